"""`train.deterministic`: the same bits again, and an operation that cannot give them is named."""

from pathlib import Path

import pytest
import torch

from paceline.errors import Outcome
from paceline.job import load_job
from paceline.launch import find_launcher
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.records import Audit, RankVerdict
from paceline.records.rundir import RunDir
from paceline.run.flow import order_for
from tests.harness import run_here
from tests.jobs import write_line_job
from tests.parity import tiny_model

ON = "train.deterministic=true"
SMALL = ["train.steps=3", "data.num_workers=0", "train.log_every=1"]


def test_two_runs_are_the_same_bits(tmp_path: Path) -> None:
    asked = [*tiny_model(), *SMALL, ON]
    first, second = (run_here(tmp_path / name, "lm_tiny", asked) for name in "ab")
    curves = [[(row.loss, row.grad_norm) for row in ends.rows] for ends in (first, second)]
    assert curves[0] == curves[1] and len(curves[0]) == 3
    for one, other in zip(first.states, second.states, strict=True):
        assert all(torch.equal(one.weights[name], w) for name, w in other.weights.items())
        assert all(torch.equal(one.optimizer[name], m) for name, m in other.optimizer.items())
    proofs = {proof.what: proof for proof in Audit.load(first.run.audit).proofs}
    assert proofs["deterministic"].ok and proofs["deterministic"].effective == "on"


def test_what_has_no_deterministic_version_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = write_line_job(tmp_path, "torch.zeros(4).put_(torch.tensor([1, 2]), torch.ones(2))")
    plain = [*SMALL, "launch.device=cpu"]
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        run_here(tmp_path / "run", job, [*plain, ON])
    told = RankVerdict.load(RunDir(tmp_path / "run").verdict(0)).error
    assert told is not None and told.place.startswith("job.py:")
    assert "hint: train.deterministic=true allows only operations that give" in told.message
    # Without it the same job runs, also in a process that has run the other.
    assert run_here(tmp_path / "free", job, plain).verdicts[0].outcome is Outcome.OK
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("own", "value"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_cublas_is_told_on_gpus(own: str | None, value: str) -> None:
    asked = [ON, "launch.device=cuda", "launch.nproc=1", "launch.overcommit=true"]
    asked += [f"launch.env.CUBLAS_WORKSPACE_CONFIG={own}"] if own else []
    job, env = load_job("lm_tiny", asked), probe()
    plan = make_plan(job, env)
    launch = find_launcher("local").plan(order_for(job, env, plan))
    assert launch.env["CUBLAS_WORKSPACE_CONFIG"] == value and plan.deterministic
    why = launch.reasons["CUBLAS_WORKSPACE_CONFIG"]
    assert why == ("launch.env" if own else "train.deterministic")
    job = load_job("lm_tiny", asked[1:])
    launch = find_launcher("local").plan(order_for(job, env, make_plan(job, env)))
    assert launch.env.get("CUBLAS_WORKSPACE_CONFIG") == own
