"""Run directories with known figures, written by hand: what readers of runs are tested on."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from paceline.config.load import dump_config
from paceline.errors import Outcome
from paceline.job import Job, load_job
from paceline.plan.planner import make_plan
from paceline.records import Env, Fingerprints, Plan, Result
from paceline.records.rundir import RunDir
from paceline.sweep.folder import COLUMNS, FAILED, NOT_THERE, SUCCESS, Row
from tests.machines import machine

TRAINING = "step,loss,lr,grad_norm,step_s,samples_per_s,tokens_per_s,skipped,warmup,val_loss\n"
STEPS = "step,warmup,wall_s,data_s,forward_s,backward_s,optimizer_s,eval_s,other_s,unaccounted_s\n"
NUM_STEPS = 40


@cache
def planned(words: tuple[str, ...]) -> tuple[Job, Plan]:
    job = load_job("lm_tiny", [f"train.steps={NUM_STEPS}", *words])
    return job, make_plan(job, machine())


def make_run(
    folder: Path, words: Sequence[str] = (), step_s: float = 0.1, loss: float = 3.0, **more: Any
) -> RunDir:
    """A run of lm_tiny on one rank. `more`: fields of its result, and `env`."""
    env: Env = more.pop("env", machine())
    job, plan = planned(tuple(words))
    run = RunDir(folder)
    run.rank(0).mkdir(parents=True)
    run.config.write_text(dump_config(job.config))
    # Not saved as records are: an fsync each would be most of what a test takes.
    run.env.write_text(env.to_json())
    run.plan.write_text(plan.to_json())
    samples, tokens = plan.batch.global_size, plan.batch.global_size * (plan.units_per_sample or 1)
    rows, steps = [], []
    for step in range(1, NUM_STEPS + 1):
        took = step_s * (1 + 0.001 * (step % 3))
        value = loss / (1 + step / 100)
        rates = f"{samples / took},{tokens / took}"
        rows.append(f"{step},{value},0.1,1.0,{took},{rates},0,{int(step <= 5)},\n")
        steps.append(f"{step},0,{took},0,{took / 2},{took / 2},0,0,0,0\n")
    run.training.write_text(TRAINING + "".join(rows))
    run.steps(0).write_text(STEPS + "".join(steps))
    run.result.write_text(make_result(run, job.fingerprint, **more).to_json())
    return run


def make_result(run: RunDir, config: str, **more: Any) -> Result:
    outcome = more.get("outcome", Outcome.OK)
    facts: dict[str, Any] = {
        "run_dir": str(run.root), "name": "x", "outcome": outcome,
        "exit_code": outcome.exit_code, "steps": NUM_STEPS, "final_loss": 2.0, "val_loss": None,
        "step_s": None, "samples_per_s": None, "tokens_per_s": None, "steps_per_s": None,
        "tflops_per_rank": None, "mfu": None, "mfu_note": "", "window": None,
        "peak_active_bytes": None, "peak_reserved_bytes": 2**29, "rank_memory": [],
        "world_size": 1, "strategy": "single", "precision": "fp32", "data_facts": {},
        "skipped_steps": 0, "bad_step": None, "bad_sample_ids": [], "failure": None, "notes": [],
        "fingerprints": Fingerprints(config=config, code="k", data="d", hardware="h"),
        "started_at": 0.0, "elapsed_s": 9.0,
    }  # fmt: skip
    return Result.model_validate(facts | more)


def make_row(group: str, repeat: int, run_dir: str, outcome: Outcome = Outcome.OK) -> Row:
    """Its row of a manifest."""
    known = {
        "mode": "bench", "group": group, "repeat": str(repeat), "run_dir": run_dir,
        "status": SUCCESS if outcome is Outcome.OK else FAILED, "outcome": str(outcome),
        "exit_code": str(outcome.exit_code),
    }  # fmt: skip
    return dict.fromkeys(COLUMNS, NOT_THERE) | known
