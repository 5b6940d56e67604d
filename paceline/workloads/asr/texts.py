"""Converts words to ids and back, as the model spells them: Whisper's tokenizer, or letters for
CTC.

    speller = find_speller("whisper", folder, "english", "transcribe")
    speller.lesson("the garden gate")        what a decoder reads, and what it shall say next
    speller.text(ids)                        what a model wrote, without its marks
    speller.processor(extractor)             to be saved beside an exported model

Where there is no folder, Whisper spells bytes: a tokenizer of Whisper's own kind, without merges.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.data.spoken import IGNORED
from paceline.errors import ConfigError, DataError
from paceline.records.words import did_you_mean
from paceline.workloads.hf.model import require_extra

END, START = "<|endoftext|>", "<|startoftranscript|>"
TASKS = ("<|translate|>", "<|transcribe|>")
MARKS = ("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
# What wav2vec2 models for English spell with: https://huggingface.co/facebook/wav2vec2-base-960h
LETTERS = ("<pad>", "<s>", "</s>", "<unk>", "|", *"ETAONIHSRDLUMWCFGYPBVK'XJQZ")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json")


@dataclass(frozen=True)
class WhisperSpeller:
    """`library` is transformers' tokenizer, with the prompt of language and task set."""

    library: Any
    is_english: bool

    @cached_property
    def prompt(self) -> list[int]:
        """What the decoder is given before its first token: start, language, task, no times."""
        return list(self.library.prefix_tokens)

    @property
    def end_id(self) -> int:
        return int(self.library.eos_token_id)

    @property
    def num_ids(self) -> int:
        return len(self.library)

    def lesson(self, text: str) -> tuple[list[int], list[int]]:
        """Return what the decoder reads, prompt and text, and what it shall say after each of its
        tokens: text and end. What follows inside the prompt is given, so it is not learned."""
        ids = list(self.library(text, add_special_tokens=False).input_ids)
        given = [IGNORED] * (len(self.prompt) - 1)
        return [*self.prompt, *ids], [*given, *ids, self.end_id]

    def text(self, ids: Sequence[int]) -> str:
        known = [x for x in ids if 0 <= x < self.num_ids]
        return str(self.library.decode(known, skip_special_tokens=True)).strip()

    def processor(self, extractor: Any) -> Any:
        return require_extra().WhisperProcessor(extractor, self.library)


@dataclass(frozen=True)
class LetterSpeller:
    """CTC: one id per letter; `library` is transformers' tokenizer of letters."""

    library: Any
    is_english: bool = True

    @property
    def blank_id(self) -> int:
        return int(self.library.pad_token_id)

    @property
    def num_ids(self) -> int:
        return len(self.library)

    def lesson(self, text: str) -> tuple[list[int], list[int]]:
        """Return what is read before it, which is nothing, and the letters, in the case that the
        tokenizer has."""
        is_upper = "A" in self.library.get_vocab()
        return [], list(self.library(text.upper() if is_upper else text.lower()).input_ids)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a frame-by-frame spelling: repeats are one letter, blanks are none."""
        return str(self.library.decode(ids)).strip()

    def processor(self, extractor: Any) -> Any:
        return require_extra().Wav2Vec2Processor(extractor, self.library)


Speller = WhisperSpeller | LetterSpeller


@cache
def find_speller(kind: str, folder: Path | None, language: str, task: str) -> Speller:
    """Return what spells for a model: the tokenizer in its folder, else bytes or letters."""
    has_own = folder is not None and any((folder / name).is_file() for name in TOKENIZER_FILES)
    if kind != "whisper":
        return LetterSpeller(_load(folder, "Wav2Vec2CTCTokenizer") if has_own else _letters())
    code = language_code(language)
    library = _load(folder, "WhisperTokenizer") if has_own else _bytes()
    is_multilingual = f"<|{code}|>" in library.get_vocab()
    if not is_multilingual and code != "en":
        raise ConfigError(
            f"model.language={language}: the tokenizer in {folder} knows no {language}\n"
            "hint: take a model for many languages, one whose name does not end in .en"
        )
    chosen = {"language": code, "task": task} if is_multilingual else {}
    library.set_prefix_tokens(**chosen)
    return WhisperSpeller(library, is_english=code == "en" or task == "translate")


def language_code(language: str) -> str:
    """Return Whisper's code of a language, from its name or code."""
    known = require_extra("transformers.models.whisper.tokenization_whisper")
    names: dict[str, str] = known.TO_LANGUAGE_CODE
    asked = language.lower()
    if asked in names:
        return names[asked]
    if asked in known.LANGUAGES:
        return asked
    guess = did_you_mean(asked, names) or "write its English name, or its code such as es\n"
    raise ConfigError(f"model.language={language} is not a language of Whisper\nhint: {guess}")


def _load(folder: Path | None, kind: str) -> Any:
    """Load a tokenizer from files alone: nothing that is read can run."""
    try:
        return getattr(require_extra(), kind).from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers has no one class for what it refuses
        why = " ".join(str(error).split())[:300]
        raise DataError(f"the tokenizer in {folder} cannot be read: {why}") from error


def _bytes() -> Any:
    """Build a tokenizer of Whisper's kind that spells bytes, with all of its languages."""
    library = require_extra("transformers.models.whisper.tokenization_whisper")
    alphabet = sorted(require_extra("tokenizers.pre_tokenizers").ByteLevel.alphabet())
    languages = [f"<|{code}|>" for code in library.LANGUAGES]
    return library.WhisperTokenizer(
        vocab={letter: number for number, letter in enumerate([*alphabet, END])},
        merges=[],
        pad_token=END,
        extra_special_tokens=[START, *languages, *TASKS, *MARKS],
    )


def _letters() -> Any:
    """Build the tokenizer of LETTERS; transformers' class reads them from a file only."""
    with TemporaryDirectory() as place:
        path = Path(place) / "vocab.json"
        path.write_text(json.dumps({letter: number for number, letter in enumerate(LETTERS)}))
        return require_extra().Wav2Vec2CTCTokenizer(str(path))
