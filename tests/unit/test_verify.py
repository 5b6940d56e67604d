"""`paceline verify` before a rank starts: what this machine cannot run is refused once."""

from pathlib import Path

import pytest

from paceline.errors import ClusterError
from paceline.verify import flow
from tests.machines import machine as env


def test_too_few_gpus_is_one_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one FAILED per strategy, and no run directory: nothing was tried."""
    monkeypatch.setattr(flow, "probe", lambda: env(num_gpus=1))
    monkeypatch.setattr(flow.Trials, "run", lambda *_, **__: "not on this machine")
    with pytest.raises(ClusterError, match="4 asked for, 1 usable here") as caught:
        flow.run_verify(["ddp", "zero3"], ["launch.nproc=4"], tmp_path / "run", lambda text: None)
    assert len(caught.value.problems) == 1
    assert not (tmp_path / "run").exists()
