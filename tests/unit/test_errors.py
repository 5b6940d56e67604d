"""Outcomes: each row says all that follows from it, and the pages say the same."""

from pathlib import Path

import pytest

from paceline import errors
from paceline.errors import Outcome, PacelineError, is_retryable_kind

ROOT = Path(__file__).parents[2]


def test_an_outcome_is_looked_up_by_its_word_and_knows_its_facts() -> None:
    stall = Outcome("stall")
    assert stall is Outcome.STALL and stall == "stall" and f"{stall}" == "stall"
    assert (stall.exit_code, stall.is_retryable, stall.is_stop) == (6, True, False)
    assert Outcome.PREEMPTED.is_stop and not Outcome.PREEMPTED.is_retryable


def test_no_two_outcomes_share_an_exit_code() -> None:
    codes = [outcome.exit_code for outcome in Outcome]
    assert len(set(codes)) == len(codes) and all(outcome.words for outcome in Outcome)


def test_every_error_ends_as_an_outcome_that_is_no_success() -> None:
    found = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = [kind for kind in found if issubclass(kind, PacelineError)]
    assert len(kinds) > 8 and all(kind.outcome is not Outcome.OK for kind in kinds)


@pytest.mark.parametrize(
    ("kind", "expected"), [("LoaderError", True), ("DataError", False), ("ValueError", False)]
)
def test_an_error_may_be_worth_another_attempt_though_its_outcome_is_not(
    kind: str, expected: bool
) -> None:
    assert is_retryable_kind(kind) is expected


def test_the_page_lists_every_exit_code_in_the_same_words() -> None:
    page = " ".join((ROOT / "docs" / "launching.md").read_text().split())
    for outcome in Outcome:
        assert f"{outcome.exit_code} {outcome.words}" in page, outcome
