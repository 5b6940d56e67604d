"""`plan --schedule`: what is counted, given and measured, and what comes of it."""

import json
from pathlib import Path

import pytest

from paceline.errors import ConfigError, DataError
from paceline.job import load_job
from paceline.machine.measures import MatmulRate, PairSpeed, keep_rates
from paceline.machine.topology import Topology
from paceline.plan.compare_schedules import Question, compare_for, cut_batch, read_names
from paceline.plan.costs import block_width, count_blocks
from paceline.plan.crew import choose_crew
from paceline.plan.planner import make_plan, measure_model
from paceline.records import ScheduleComparison, ScheduleRow
from paceline.records.rundir import RunDir
from paceline.schedules.formulas import bubble_formula
from paceline.schedules.orders import NAMES, draw_schedule
from paceline.schedules.requirements import AUTO_STAGES
from paceline.schedules.simulate import pairing_of
from paceline.schedules.sources import load_measured_times, load_times_file
from paceline.schedules.timeline import Times
from paceline.strategies.base import Share
from tests.machines import machine as env
from tests.pipelined import plan_of, write_run

EQUAL = "forward_s: 1e-3\ninput_s: 1e-3\nweight_s: 1e-3\ntransfer_s: 0\n"
SMALL = ["launch.device=cpu", "train.micro_batch_size=16", "model.num_layers=8"]


@pytest.fixture(autouse=True)
def _no_kept_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def equal(tmp_path: Path) -> Path:
    path = tmp_path / "times.yaml"
    path.write_text(EQUAL)
    return path


def compare(*overrides: str, gpus: int = 0, **asked: object) -> ScheduleComparison:
    job = load_job("lm_tiny", [*SMALL, *overrides])
    return compare_for(job, env(gpus), Topology(), Question(**asked), lambda text: None)  # type: ignore[arg-type]


def by_name(made: ScheduleComparison) -> dict[str, ScheduleRow]:
    return {row.name: row for row in made.schedules}


def test_equal_given_times_are_the_closed_formulas(equal: Path) -> None:
    made = compare("launch.nproc=4", times=equal)
    rows = by_name(made)
    assert rows["1f1b"].bubble == pytest.approx(3 / 19)
    assert rows["gpipe"].bubble == pytest.approx(3 / 19)
    assert rows["interleaved_1f1b"].bubble == pytest.approx(3 / 35)
    assert rows["dualpipe"].step_s <= rows["1f1b"].step_s  # type: ignore[operator]
    assert set(rows) == set(NAMES) and all(row.is_exact for row in made.schedules)
    share = {name: 4 / draw_schedule(name, 4, 16).num_stages for name in NAMES}
    exact_s = {
        name: bubble_formula(
            name, 4, 16, Times(*[share[name] * 2e-3] * 3), pairing=pairing_of(name)
        ).total_s
        for name in NAMES
    }
    for name, row in rows.items():
        assert row.step_s == pytest.approx(exact_s[name]), name
    steps = [round(exact_s[row.name], 9) for row in made.schedules]
    assert steps == sorted(steps), "ranked as the formulas rank them"
    assert made.best is made.schedules[0] and made.best.name == "dualpipe"
    assert made.drawing.startswith("rank 0  F0")
    assert rows["1f1b"].needed is not None and rows["1f1b"].needed.num_microbatches == 27


def test_the_record_is_json_and_says_where_numbers_come_from(equal: Path) -> None:
    body = json.loads(compare("launch.nproc=4", times=equal, names=("1f1b",)).to_json())
    assert body["schema"] == 1 and body["num_microbatches"] == 16
    kinds = {source["what"]: source["kind"] for source in body["sources"]}
    assert kinds["times"] == kinds["transfers"] == "given"
    assert kinds["memory"] == "counted"


def test_what_cannot_run_is_listed_with_the_nearest_that_can(equal: Path) -> None:
    made = by_name(compare("launch.nproc=3", "strategy.microbatches=2", times=equal))
    assert "even number of ranks" in made["dualpipe"].because
    assert "set launch.nproc to 4" in made["dualpipe"].because
    assert "set strategy.microbatches to 3" in made["1f1b"].because
    few = by_name(compare("launch.nproc=4", "model.num_layers=5", times=equal))
    assert "8 stages of a model of 5 blocks" in few["zbv"].because
    assert "set launch.nproc to 2, or use a model of 8 blocks" in few["zbv"].because
    assert few["zbv"].status == "refused" and few["zbv"].step_s is None


def test_names() -> None:
    assert read_names("all") == NAMES
    assert read_names("1f1b, dualpipe,1f1b") == ("1f1b", "dualpipe")
    with pytest.raises(ConfigError, match="did you mean 1f1b?") as error:
        read_names("1f1,dualpip")
    assert len(error.value.problems) == 2
    with pytest.raises(ConfigError, match="the schedules are"):
        read_names("")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (EQUAL.replace("forward_s: 1e-3", "forward_s: [1, 2, 3]"), "3 values, and .* 8 blocks"),
        (EQUAL.replace("forward_s", "foward_s"), "did you mean forward_s?"),
        (EQUAL.replace("input_s: 1e-3\n", ""), "has no input_s\nhint: give one number, or a list"),
        (EQUAL.replace("1e-3", "soon", 1), "'soon', which is not a number"),
        (EQUAL.replace("1e-3", "-1", 1), "finite numbers from 0 on"),
        (EQUAL.replace("1e-3", ".nan", 1), "finite numbers from 0 on"),
        (EQUAL.replace("transfer_s: 0", "transfer_s: [0, 0]"), "one number for all"),
        (EQUAL.replace("1e-3", "0"), "are 0"),
        ("[1, 2]", "must be a map"),
    ],
)
def test_a_times_file_that_is_wrong_says_how(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "times.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_times_file(path, 8)


def test_a_times_file_may_be_json_and_state_memory(tmp_path: Path) -> None:
    """A stage of two blocks holds 2 GiB of state: two of them do not fit in 3."""
    path = tmp_path / "times.json"
    body = {key: [0.001] * 8 for key in ("forward_s", "input_s", "weight_s")}
    more = {"state_bytes": 2**30, "activation_bytes": 1e6, "memory_bytes": 3 * 2**30}
    path.write_text(json.dumps(body | more))
    made = by_name(compare("launch.nproc=4", times=path))
    assert made["dualpipe"].status == "too large" and made["1f1b"].status == "fits"
    assert made["1f1b"].peak_bytes == 2 * 2**30 + 4 * 2 * 1e6
    assert made["dualpipe"].against_best is not None


def test_counted_flops_are_the_workloads() -> None:
    """Forward and backward of all blocks are what the workload says a sample costs."""
    for overrides in ([], ["model.tied=false"]):
        job = load_job("lm_tiny", overrides)
        model = measure_model(job.workload, job.config)
        blocks, _ = count_blocks(job.workload, job.config, model, Share(1, None))
        assert sum(b.flops for b in blocks) == pytest.approx(job.workload.flops(job.config))
        assert blocks[-1].flops > blocks[0].flops == blocks[1].flops  # the head
        # lm_tiny: 128 wide, 128 tokens, fp32
        assert blocks[0].sent_bytes == 128 * 128 * 4
        assert block_width([p for p in model.parameters if p.unit == 1]) == 128


def test_recomputing_costs_a_forward_and_saves_activations() -> None:
    def first(*overrides: str):  # type: ignore[no-untyped-def]
        job = load_job("lm_tiny", list(overrides))
        model = measure_model(job.workload, job.config)
        return count_blocks(job.workload, job.config, model, Share(1, None))[0][0]

    plain, full = first(), first("train.activation_checkpointing=full")
    assert full.input_flops == plain.input_flops + plain.forward_flops
    assert full.activation_bytes == full.sent_bytes < plain.activation_bytes


def test_state_is_that_of_the_whole_model() -> None:
    """AdamW on fp32: 16 bytes a parameter; a tied table is held by both its stages."""
    job = load_job("lm_tiny", ["model.tied=false"])
    model = measure_model(job.workload, job.config)
    blocks, _ = count_blocks(job.workload, job.config, model, Share(1, None))
    numel = sum(p.numel for p in model.parameters)
    counts = 4 * len(model.parameters)  # AdamW counts its steps for each
    assert sum(b.state_bytes for b in blocks) == 16 * numel + counts


def test_unknown_rates_are_said_and_kept_ones_used() -> None:
    made = compare("launch.nproc=2")
    because = {source.what: source.because for source in made.sources}
    assert "only relative times" in because["rate"] and "gloo" in because["link"]
    machine = env()
    crew = choose_crew(load_job("lm_tiny", [*SMALL, "launch.nproc=2"]).config.launch, machine,
                       Topology())  # fmt: skip
    rate = MatmulRate(precision="fp32", side=1024, tflop_per_s=2.0, best_tflop_per_s=2.1)
    pairs = [
        PairSpeed(a=0, b=1, num_bytes=2**22, one_way_s=1e-3, gb_per_s=speed) for speed in (4.0, 8.0)
    ]
    keep_rates(machine, crew, 8, [rate], pairs)
    kept = compare("launch.nproc=2")
    assert kept.block_forward_s[0] == pytest.approx(made.block_forward_s[0] / 2)
    assert kept.transfer_s == pytest.approx(made.transfer_s / 2)  # 4 GB/s, the slowest; 2 assumed
    assert {s.kind for s in kept.sources if s.what in ("rate", "link")} == {"measured"}


def test_gpus_have_a_peak_and_a_memory() -> None:
    job = load_job("lm_tiny", [*SMALL, "launch.device=cuda", "launch.nproc=2"])
    made = compare_for(job, env(2), Topology(), Question(names=("1f1b",)), lambda text: None)
    because = {source.what: source.because for source in made.sources}
    assert "989.4 TFLOP/s" in because["rate"] and "141 GiB" in because["memory of a rank"]
    assert made.memory_bytes == 141 * 2**30


@pytest.mark.parametrize(
    ("micro", "asked", "expected", "hint"),
    [
        (32, "auto", (16, 2), None),
        (20, "auto", (20, 1), None),
        (8, "auto", (8, 1), None),  # fewer than four a rank, and what the schedule takes
        (2, "auto", (16, 1), "set it to 16, or strategy.microbatches to 2"),
        (20, "6", (6, 3), "set it to 18, or strategy.microbatches to 5"),
    ],
)
def test_microbatches_of_a_batch(
    micro: int, asked: str, expected: tuple[int, int], hint: str | None
) -> None:
    overrides = [f"train.micro_batch_size={micro}", f"strategy.microbatches={asked}"]
    cut, findings = cut_batch(load_job("lm_tiny", overrides).config, num_ranks=4)
    assert (cut.num_microbatches, cut.samples) == expected
    assert [finding.hint for finding in findings] == ([hint] if hint else [])


@pytest.mark.parametrize("micro", [4, 8, 12, 16, 20, 48])
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_train_and_the_comparison_cut_a_batch_alike(micro: int, schedule: str, equal: Path) -> None:
    asked = ["launch.nproc=4", f"train.micro_batch_size={micro}", f"strategy.schedule={schedule}"]
    compared = compare(*asked, times=equal, names=(schedule,))
    trained = make_plan(load_job("lm_tiny", [*SMALL, *asked, "strategy.name=pipeline"]), env())
    if trained.pipeline is not None:
        assert compared.num_microbatches == trained.pipeline.num_microbatches
        assert not [f for f in compared.findings if f.where == "train.micro_batch_size"]
    else:
        assert [f for f in compared.findings if f.where == "train.micro_batch_size"]


def test_stages_leave_room_for_several_pipelines(equal: Path) -> None:
    made = compare("launch.nproc=8", "strategy.stages=4", times=equal, names=("1f1b",))
    assert (made.num_ranks, made.num_pipelines) == (4, 2)
    with pytest.raises(ConfigError, match="not a multiple"):
        compare("launch.nproc=8", "strategy.stages=3")
    with pytest.raises(ConfigError, match="pipeline of 1 rank"):
        compare("launch.nproc=1")
    with pytest.raises(ConfigError, match="--bubble 10 is not a share"):
        compare("launch.nproc=2", bubble=10.0)


def make_run(folder: Path, schedule: str, times: Times, *overrides: str) -> Path:
    """What a pipeline of 4 blocks on 2 ranks leaves, its passes made by the simulator."""
    run = RunDir.create("run", folder)
    run.config.write_text("name: run\n")
    job = load_job("lm_tiny", ["launch.device=cpu", "launch.nproc=2", *overrides])
    drawn = plan_of(draw_schedule(schedule, 2, 8), AUTO_STAGES[schedule])
    width = 4 // len(drawn.stages)
    stages = [
        stage.model_copy(update={"first_block": width * n, "end_block": width * (n + 1)})
        for n, stage in enumerate(drawn.stages)
    ]
    drawn = drawn.model_copy(update={"stages": stages})
    make_plan(job, env()).model_copy(update={"pipeline": drawn}).save(run.plan)
    write_run(run, drawn, times)
    return run.root


def test_times_measured_in_a_run(tmp_path: Path) -> None:
    """8 microbatches of 8 samples: one each. Passes are up to 5 % slower than the times given."""
    run = make_run(tmp_path / "a", "1f1b", Times([0.02, 0.04], [0.02, 0.04], [0.02, 0.04], 0.003))
    times = load_measured_times(run, [1, 1, 1, 3], samples=1)
    assert times.forward_s == pytest.approx([0.01, 0.01, 0.01, 0.03], rel=0.05)
    assert times.input_s == pytest.approx(times.weight_s)
    assert times.backward_s == pytest.approx([0.02, 0.02, 0.02, 0.06], rel=0.05)
    assert times.transfer_s == pytest.approx(0.003, rel=0.1)
    assert "measured in" in times.because and "halves are taken as equal" in times.notes[0]
    twice = load_measured_times(run, [1, 1, 1, 3], samples=2)
    assert twice.forward_s == pytest.approx([2 * s for s in times.forward_s])
    assert "scaled to 2" in twice.notes[0]


def test_a_run_is_compared_with_its_own_times(tmp_path: Path) -> None:
    """zbv's four stages of one block each: what the run took is what the simulator says of it."""
    run = make_run(tmp_path / "b", "zbv", Times(0.01, 0.01, 0.01))
    made = compare("launch.nproc=2", "model.num_layers=4", "train.micro_batch_size=8", times=run)
    assert made.sources[0].kind == "measured"
    row = by_name(made)["zbv"]
    assert 0.49 <= (row.step_s or 0) <= 0.49 * 1.05  # 48 slots of work, one F to get there


def test_runs_without_times_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "c", "1f1b", Times(0.01, 0.01, 0.01))
    with pytest.raises(ConfigError, match="model of 4 blocks, and this one has 8"):
        load_measured_times(run, [1.0] * 8, 1)
    RunDir(run).passes(1).unlink()
    with pytest.raises(DataError, match="no pass that all its ranks measured"):
        load_measured_times(run, [1.0] * 4, 1)
    make_plan(load_job("lm_tiny", ["launch.device=cpu"]), env()).save(RunDir(run).plan)
    with pytest.raises(ConfigError, match="ran single, not a pipeline"):
        load_measured_times(run, [1.0] * 4, 1)
