"""The soak itself: two minutes of seeded faults on the real program, and nothing is lost."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.program import environment

SOAK = Path(__file__).parents[2] / "scripts" / "soak"
TIMEOUT_S = 900


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_two_minutes_of_faults_end_as_the_clean_run_does(tmp_path: Path) -> None:
    out = tmp_path / "soak"
    done = subprocess.run(
        [sys.executable, SOAK, "--seconds", "120", "--every", "20", "--seed", "1", "--out", out],
        env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ETTR 0\.\d+ while faults came", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^\d+ faults, \d+ attempts:", done.stdout, re.MULTILINE), done.stdout


def test_a_kind_that_does_not_exist_is_named() -> None:
    done = subprocess.run(
        [sys.executable, SOAK, "--kinds", "kill,flood"], env=environment(), capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2 and "no such kind: flood" in done.stderr
