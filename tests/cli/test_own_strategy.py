"""A strategy that an installed package brings is proven by the real program, on its ranks too."""

import os
import shutil
from pathlib import Path

import pytest

from tests import toy_strategy
from tests.cli.program import paceline


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """What pip would leave of a package with one module and one entry point: a PYTHONPATH."""
    folder = tmp_path / "site"
    about = folder / "toy-0.1.dist-info"
    about.mkdir(parents=True)
    shutil.copy(toy_strategy.__file__, folder / "brought.py")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[paceline.strategies]\ntoy = brought:TOY\n")
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


@pytest.mark.nightly
def test_a_strategy_of_another_package_is_proven(tmp_path: Path, installed: str) -> None:
    words = ["toy", "launch.device=cpu", "strategy.toy_pieces=2"]
    ran = paceline("verify", *words, cwd=tmp_path, PYTHONPATH=installed)
    assert ran.code == 0, ran.out + ran.err
    assert "1 of 1 proven on 2 ranks" in ran.out
    unknown = paceline("verify", "toy", cwd=tmp_path)
    assert unknown.code == 2 and "there is no strategy 'toy'" in unknown.err
