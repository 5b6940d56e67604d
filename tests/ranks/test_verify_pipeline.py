"""`paceline verify pipeline`: every schedule on 2 and 4 ranks, against one process."""

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.schedules.orders import NAMES
from tests.proofs import assert_proven, verify

ALL = [f"pipeline_{name}" for name in NAMES]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_schedule_is_proven(num_ranks: int, tmp_path: Path) -> None:
    report = verify(["pipeline"], [f"launch.nproc={num_ranks}"], tmp_path / "run")
    assert_proven(report, *ALL)


@pytest.mark.nightly
def test_the_schedule_that_torch_does_not_run_is_proven(tmp_path: Path) -> None:
    report = verify(["pipeline_dualpipe"], ["launch.nproc=2"], tmp_path / "run")
    assert_proven(report, "pipeline_dualpipe")


def test_a_schedule_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no strategy 'pipeline_2f2b'"):
        verify(["pipeline_2f2b"], ["launch.nproc=2"], tmp_path / "run")


@pytest.mark.nightly
def test_a_schedule_can_be_set(tmp_path: Path) -> None:
    settings = ["launch.nproc=2", "strategy.schedule=zbv"]
    report = verify(["pipeline"], settings, tmp_path / "run")
    assert_proven(report, "pipeline_zbv")
