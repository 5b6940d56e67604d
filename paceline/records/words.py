"""Formats numbers and names for people: sizes, durations, rates, counts, intervals, Markdown
tables, and the known name nearest to a misspelt one. Makes text of others safe to show: `visible`
on a screen or a page, `plain` in Markdown, `text_cell` in a spreadsheet."""

import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

SIZES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
RATES = (("TFLOP/s", 1.0), ("GFLOP/s", 1e-3), ("MFLOP/s", 1e-6))
SHORT = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
MINUTE, HOUR, DAY = 60, 3600, 86400
# What Markdown, or the HTML that it becomes, would act on.
SIGNS = (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("[", "\\["), ("`", "\\`"))
# What a terminal acts on, or what makes a line read otherwise than it is written: control
# characters but tab and line break, marks of direction, Unicode's line breaks, half characters.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
FORMULA = re.compile(r"'*[=+\-@]")  # how a cell begins that a spreadsheet computes, or one guarded


def number(value: float, digits: int = 4) -> str:
    """Write `digits` digits, or all of those before the point: `0.1235`, `12.35`, `123,457`."""
    is_long = abs(value) >= min(1000, 10**digits - 0.5)
    return f"{value:,.0f}" if is_long else f"{value:.{digits}g}"


def short(value: float) -> str:
    """Write a number so that it fits beside an axis: 1500 is `1.5k`."""
    unit, scale = next(((u, s) for u, s in SHORT if abs(value) >= s), ("", 1.0))
    return f"{value / scale:.4g}{unit}"


def size(num_bytes: float) -> str:
    """Write bytes in the largest unit that they fill: `812 MiB`, `1.3 GiB`."""
    unit, scale = next(((u, s) for u, s in SIZES if num_bytes >= s), SIZES[-1])
    return f"{number(num_bytes / scale, 3)} {unit}"


def few(names: Iterable[str], most: int = 8) -> str:
    """Write the first of many names, and how many are left: `a, b and 3 more`."""
    known = list(names)
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit that a time is best told in, and how many seconds it has."""
    return next((unit for unit in TIMES if seconds >= unit[1]), TIMES[-1] if seconds else TIMES[0])


def duration(seconds: float, digits: int = 3) -> str:
    """Write a time that was measured: `1.23 s`, `45.6 ms`, `7.8 µs`."""
    unit, scale = time_unit(seconds)
    return f"{number(seconds / scale, digits)} {unit}"


def elapsed(seconds: float) -> str:
    """Write how long somebody waited: `7 s`, `3 min 20 s`, `1 h 2 min`, `2 d 5 h`."""
    whole = round(seconds)
    if whole < 2 * MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE} s"
    if whole < 2 * DAY:
        return f"{whole // HOUR} h {whole % HOUR // MINUTE} min"
    return f"{whole // DAY} d {whole % DAY // HOUR} h"


def flop_rate(tflop_per_s: float) -> str:
    """Write a rate of computing: `412 TFLOP/s`, `0.3 TFLOP/s`, `3.5 GFLOP/s`."""
    unit, scale = next(((u, s) for u, s in RATES if tflop_per_s >= 0.1 * s), RATES[-1])
    return f"{number(tflop_per_s / scale, 3)} {unit}"


def count(how_many: int, noun: str, several: str = "") -> str:
    """Write a count with its noun: `1 rank`, `2 ranks`, `1,024 ranks`."""
    return f"{how_many:,} {noun if how_many == 1 else several or noun + 's'}"


def interval(value: float, low: float, high: float) -> str:
    """Write a value between what it may truly be: `123.4 (120.1 to 126.2)`."""
    return f"{number(value)} ({number(low)} to {number(high)})"


def ratio(value: float, low: float, high: float) -> str:
    """Write a ratio, such as a speedup, with its interval: `1.082 (1.051 to 1.114)`."""
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def shown(value: object) -> str:
    """Write a value of a plan; None is something that is not known yet."""
    if value is None:
        return "unknown"
    return number(value) if isinstance(value, float) else str(value)


def typed(path: Path) -> str:
    """Write a path as one would type it from here."""
    try:
        return visible(str(path.relative_to(Path.cwd())))
    except (ValueError, OSError):  # it lies elsewhere, or "here" is gone
        return visible(str(path))


def nearest(name: str, known: Collection[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that a misspelt one most likely meant, if any is near."""
    close = get_close_matches(name, known, n=1, cutoff=cutoff)
    return close[0] if close else None


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return `did you mean X? ` for the front of a hint; empty where nothing is near."""
    close = nearest(name, known)
    return f"did you mean {close}? " if close else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose cells stay in their row and act on nothing."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(plain(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def visible(text: str) -> str:
    """Return a text that a terminal only shows: what it would act on is written out, as `\\x1b`.
    Lines and tabs stay."""
    return UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def plain(text: str) -> str:
    """Return a text in one line, with what Markdown or HTML would act on made plain."""
    flat = " ".join(visible(text).split())
    for sign, harmless in SIGNS:
        flat = flat.replace(sign, harmless)
    return flat


def text_cell(text: str) -> str:
    """Return a text as one cell of a table: in one line, and with a `'` before it where a
    spreadsheet would take it for a formula. What is a number stays one."""
    flat = " ".join(visible(text).split())
    return f"'{flat}" if FORMULA.match(flat) and not _is_number(flat) else flat


def from_cell(cell: str) -> str:
    """Return the text that `text_cell` has guarded."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
