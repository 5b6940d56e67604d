"""Scores transcripts: word and character error rates, by jiwer.

    normalise = find_normaliser(speller)
    error_rates([(normalise(said), normalise(written)), ...])      {"wer": ..., "cer": ...}

Texts are compared as Whisper's authors do: without case, punctuation and fillers, numbers as digits
in English (https://arxiv.org/abs/2212.04356, appendix C).
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

from paceline.data.extras import require_extra
from paceline.workloads.asr.texts import Speller

Normalise = Callable[[str], str]


@cache
def find_normaliser(speller: Speller) -> Normalise:
    """Return Whisper's rules for the language: those for English, or the basic ones. British
    spellings are known where the model's folder has a normalizer.json."""
    library = require_extra("transformers.models.whisper.english_normalizer", "hf")
    if not speller.is_english:
        basic: Normalise = library.BasicTextNormalizer()
        return basic
    spellings = getattr(speller.library, "english_spelling_normalizer", None) or {}
    english: Normalise = library.EnglishTextNormalizer(spellings)
    return english


def error_rates(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Return `wer` and `cer` of what was written, second, for what was said, first, both
    normalised: errors of all utterances by words, and by characters, of all. What is nothing after
    normalising, as `hm` is, has no word to count and is left out."""
    jiwer = require_extra("jiwer", "audio")
    kept = [(said, written) for said, written in pairs if said.strip()]
    if not kept:
        return {"wer": math.nan, "cer": math.nan}
    said, written = (list(column) for column in zip(*kept, strict=True))
    return {"wer": float(jiwer.wer(said, written)), "cer": float(jiwer.cer(said, written))}
