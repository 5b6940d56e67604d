"""A finished run directory of 2 ranks and 20 steps, written by hand, and its report."""

from pathlib import Path

from paceline.config.schema import LaunchConfig
from paceline.errors import Outcome
from paceline.launch.base import LaunchOrder, draw_plan
from paceline.launch.ending import LaunchEnd, judge_end
from paceline.records import RankEnd, RankVerdict, Result
from paceline.records.rundir import RunDir
from paceline.report import write_report
from paceline.run.conclude import Circumstances, conclude
from paceline.run.rank import TRAIN
from tests.machines import machine
from tests.machines import plan as make_test_plan

HEADER = "step,loss,lr,grad_norm,step_s,samples_per_s,tokens_per_s,skipped,warmup,val_loss\n"
STEPS_HEADER = (
    "step,warmup,wall_s,data_s,forward_s,backward_s,optimizer_s,eval_s,other_s,unaccounted_s\n"
)


def write_run(folder: Path) -> RunDir:
    """A run of 2 ranks and 20 steps, written by hand."""
    made = RunDir.create("r", folder)
    plan = make_test_plan("launch.nproc=2", "name=fixture")
    plan.save(made.plan)
    machine().save(made.env)
    made.config.write_text("name: fixture\ntrain:\n  log_every: 5\n")
    order = LaunchOrder(LaunchConfig(), plan.crew, machine(), 1, TRAIN, "lm")
    draw_plan(order, argv=[], hosts=["box"]).save(made.launch)
    lines = [
        f"{s},{5 / s},0.1,1.5,0.5,32,4096,0,{int(s <= 5)},{2.0 if s == 20 else ''}\n"
        for s in range(1, 21)
    ]
    made.training.write_text(HEADER + "".join(lines))
    for rank in (0, 1):
        made.rank(rank).mkdir(parents=True)
        rows = [f"{s},0,0.5,0.01,0.1,0.3,0.05,0,0.01,0.03\n" for s in range(1, 21)]
        made.steps(rank).write_text(STEPS_HEADER + "".join(rows))
        verdict(rank).save(made.verdict(rank))
    return made


def verdict(rank: int, **more: object) -> RankVerdict:
    facts = {
        "rank": rank, "host": "box", "outcome": Outcome.OK, "step": 20, "ended_at": 10.0 + rank,
        "flops_per_sample": 1e9, "flops_source": "counted",
        "peak_reserved_bytes": 2**20 * (rank + 1),
    }  # fmt: skip
    return RankVerdict.model_validate(facts | more)


def ended(codes: dict[int, int]) -> LaunchEnd:
    return LaunchEnd({r: RankEnd(rank=r, host="box", exit_code=c) for r, c in codes.items()})


def finish(run: RunDir, end: LaunchEnd | None = None) -> Result:
    ending = judge_end(run, 2, end or LaunchEnd())
    known = Circumstances(ending, "c", "k", {"unigram_entropy": 3.25}, 1.0, 11.0)
    result = conclude(run, make_test_plan("launch.nproc=2", "name=fixture"), machine(), known)
    result.save(run.result)
    write_report(run)
    return result
