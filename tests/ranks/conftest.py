"""Fixtures of the tests that start ranks."""

import pytest

from tests.harness import RankEnds, run_here
from tests.parity import BATCH, SGD, tiny_model


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> RankEnds:
    """One process, the whole batch at once: what every strategy must compute."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    return run_here(folder, "lm_tiny", [*tiny_model(), *SGD, *BATCH, "train.micro_batch_size=16"])
