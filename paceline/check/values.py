"""Values of environment variables, read as their readers do: NCCL, torch and OpenMP differ.

Text -> the pieces that its reader does not know, or the interfaces that it chooses.
"""

import re
from dataclasses import dataclass
from typing import Literal

Form = Literal["word", "whole", "counts", "list", "per function"]
# Names that NCCL_ALGO and NCCL_PROTO may put before a colon (ncclFuncStr in src/init.cc).
FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


@dataclass(frozen=True)
class Values:
    """What a reader takes, and what it does with anything else."""

    words: tuple[str, ...] = ()
    numbers: range | None = None
    # word: one word, or a number as C reads it, up to the first other letter. whole: nothing but
    # a number. counts: whole numbers and commas. list: words and commas, after ^ those to leave
    # out. per function: NCCL's "ring;allreduce:tree,ring".
    form: Form = "word"
    capitals: bool = False  # whether capitals matter
    otherwise: str = ""  # empty: not documented
    refused: bool = False  # `otherwise` stops the run, or harms it unseen
    empty: bool = True  # an empty value counts as unset

    def describe(self) -> str:
        """What may stand there, as words for a message."""
        span: list[str] = []
        if self.numbers is not None:
            low, high, step = self.numbers[0], self.numbers[-1], self.numbers.step
            steps = f" in steps of {step}" if step > 1 else ""
            if high >= 2**30:
                span = ["a whole number" if low < 0 else f"a whole number from {low}"]
            else:
                span = [f"{low} or {high}" if high == low + 1 else f"{low} to {high}{steps}"]
        text = ", ".join([*self.words, *span])
        if self.form == "per function":
            functions = ", ".join(FUNCTIONS)
            return f"{text}, as a list with commas or FUNCTION:list;FUNCTION:list of {functions}"
        return f"{text}, as a list with commas" if self.form == "list" else text


def unknown_parts(values: Values, text: str) -> list[str]:
    """The pieces of `text` that its reader does not know, read as that reader does."""
    if values.form == "per function":
        return _unknown_in_functions(values, text)
    if values.form == "list":
        parts = [part for part in text.removeprefix("^").split(",") if part]
    else:
        parts = text.split(",") if values.form == "counts" else [text]
    return [part for part in parts if not _known_part(values, part)]


def _known_part(values: Values, part: str) -> bool:
    if part in values.words or (not values.capitals and part.lower() in _lower(values.words)):
        return True
    if values.numbers is None:
        return False
    if values.form in ("whole", "counts"):
        number = int(part) if re.fullmatch(r"\s*\+?[0-9]{1,18}\s*", part) else None
    else:
        number = leading_number(part)
    return number is not None and number in values.numbers


def leading_number(text: str) -> int | None:
    """A number as C's strtoll(text, 0, 0) and std::stoi take it; None where there is none."""
    match = re.match(r"\s*([+-]?)(0[xX][0-9a-fA-F]{1,18}|[0-9]{1,18})", text)
    if match is None:
        return None
    sign, digits = match.groups()
    size = int(digits, 16) if digits[:2].lower() == "0x" else int(digits)
    return -size if sign == "-" else size


def _unknown_in_functions(values: Values, text: str) -> list[str]:
    bad: list[str] = []
    for index, (function, words) in enumerate(split_functions(text)):
        if function is None and index > 0:
            bad.append(f";{words}")
        elif function is not None and function.lower() not in _lower(FUNCTIONS):
            bad.append(f"{function}:")
        parts = [part for part in words.removeprefix("^").split(",") if part]
        bad += [part for part in parts if not _known_part(values, part)]
    return bad


def split_functions(text: str) -> list[tuple[str | None, str]]:
    """`ring;allreduce:tree,ring` -> [(None, "ring"), ("allreduce", "tree,ring")], as NCCL does."""
    pairs: list[tuple[str | None, str]] = []
    for entry in filter(None, text.split(";")):
        pieces = [piece for piece in entry.split(":") if piece]
        if len(pieces) == 1:
            pairs.append((None, pieces[0]))
        elif pieces:
            pairs.append((pieces[0], pieces[1]))
    return pairs


def nccl_interfaces(asked: str, here: tuple[str, ...]) -> list[str]:
    """Those NCCL uses (ncclFindInterfaces in src/misc/socket.cc): prefixes, =exact, ^all but."""
    without = asked.startswith("^")
    rest = asked.removeprefix("^")
    exact = rest.startswith("=")
    named = [part.split(":")[0] for part in rest.removeprefix("=").split(",")]
    named = [part for part in named if part]

    def fits(name: str) -> bool:
        if not named:
            return True
        return name in named if exact else name.startswith(tuple(named))

    return [name for name in here if fits(name) != without]


def gloo_interfaces(asked: str, here: tuple[str, ...]) -> list[str]:
    """Those gloo uses: exact names, and none at all when one of them is not here."""
    named = asked.split(",")
    return named if set(named) <= set(here) else []


def _lower(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.lower() for word in words)
