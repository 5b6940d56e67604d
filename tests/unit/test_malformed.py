"""Input that is no input: one refusal with the place and a hint, exit 2 where it was asked, 4 where
a run has left it; never a traceback, and no waiting for what is not a file."""

import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from paceline.bench.target import parse_target
from paceline.config.load import load_config
from paceline.config.plain import read_plain
from paceline.diagnose.flow import diagnose
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.health.evidence import _log_end, read_evidence
from paceline.job import job_schema, load_job, reload_job
from paceline.machine.hosts import read_hostfile
from paceline.plan.planner import make_plan
from paceline.records import Env, Plan
from paceline.records.heartbeats import Beat, iter_beats, last_beat
from paceline.records.rundir import RunDir
from paceline.records.table_file import TableFile
from paceline.records.tables import TRAINING, read_telemetry, read_training
from paceline.records.tails import Tail
from paceline.schedules.passes import read_passes
from paceline.stats.figures import measure_run
from paceline.sweep.folder import NEEDED, load_manifest, save_manifest
from paceline.sweep.spec import read_spec
from paceline.watch.state import _sure_after_s
from paceline.workloads.base import find_workload
from paceline.workloads.lm.model import LM
from tests.machines import MACHINE
from tests.measured import make_run

RECIPE = "name: x\nworkload: lm\n"
DIGITS = "7" * 5001


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """A read that waits for a writer ends as a failure of its own, soon."""

    def ring(number: int, frame: FrameType | None) -> None:
        pytest.fail("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(40)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refusal(act: Callable[[], object], kind: type[PacelineError]) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


def of_yaml(path: Path, text: str | bytes) -> str:
    """Refuse it as a recipe and as a run's own config; return what is said of the recipe."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    schema = job_schema(find_workload("lm", typed=False))
    refusal(lambda: load_config(path, schema), ConfigError)
    return refusal(lambda: load_job(str(path), []), ConfigError)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (RECIPE + "observe: {null: 1}\n", "run.yaml:3: null is not a key"),
        (RECIPE + "observe:\n  ~: 1\n", "run.yaml:4: ~ is not a key"),
        (RECIPE + "observe:\n  ? [a]\n  : 1\n", "run.yaml:4: a list is not a key"),
        (RECIPE + "observe: {<<: {a: 1}}\n", "run.yaml:3: << is not a key"),
        (RECIPE + f"train:\n  seed: {DIGITS}\n", "run.yaml:4: a number of 5001 digits"),
        (RECIPE + f"optim: {{lr: {DIGITS}.0}}\n", "run.yaml:3: a number of 5003 digits"),
        (b"name: x\nworkload: l\xffm\n", "run.yaml:2: it is not text in UTF-8"),
    ],
)
def test_a_config_is_refused_with_its_line(tmp_path: Path, text: str | bytes, says: str) -> None:
    said = of_yaml(tmp_path / "run.yaml", text)
    assert says in said and "hint: " in said


@pytest.mark.parametrize("value", ['"${a"', '"${a.b:}"', "${}", '"${oc.env:HOME"'])
def test_a_broken_reference_is_refused_with_its_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE + f"optim:\n  clip: {value}\n")
    said = refusal(lambda: load_job(str(path), []), ConfigError)
    assert "run.yaml" in said and "hint: " in said


def test_dates_are_text_for_every_reader(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: 2020-01-01\nworkload: lm\n")
    config = load_job(str(path), []).config
    assert load_config(path, type(config)) == config and config.name == "2020-01-01"
    assert load_job("lm_tiny", ["name=2020-01-01"]).config.name == "2020-01-01"


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + RECIPE.encode())
    assert load_job(str(path), []).config.name == "x"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.schedule={0}", "unknown key optim.schedule.0 in override"),
        ("optim.schedule={a: {b: 1}}", "unknown key optim.schedule.a in override"),
        ("optim.schedule=[]", "optim.schedule=[] in override"),
        (f"launch.nproc=1{'0' * 400}", "is a number of 401 digits"),
        (f"train.steps={DIGITS}", "a number of 5001 digits"),
        ("name=\udcff", "is not text in UTF-8"),
        ("launch.devices=[]", "launch.devices=[] in override"),
        ("launch.env={null: 1}", "launch.env={null: 1}"),
        ("model={1.5: 1}", "unknown key model.1.5 in override"),
        ("train=${train}", "train"),
        ("optim.lr=${optim.lr}", "optim.lr"),
    ],
)
def test_an_override_is_refused_with_its_key(override: str, says: str) -> None:
    said = refusal(lambda: load_job("lm_tiny", [override]), ConfigError)
    assert says in said


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_not_a_file_is_refused_without_waiting(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "a.yaml"
    make(path)
    for act in (
        lambda: load_job(str(path), []),
        lambda: read_plain(path),
        lambda: read_spec(str(path), [], [], {}),
        lambda: read_hostfile(str(path)),
    ):
        assert "is not a plain file" in refusal(act, ConfigError)


def test_a_config_and_a_hostfile_may_be_links(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RECIPE)
    (tmp_path / "hosts").write_text("a slots=2\n")
    (tmp_path / "link.yaml").symlink_to("run.yaml")
    (tmp_path / "link").symlink_to("hosts")
    assert load_job(str(tmp_path / "link.yaml"), []).config.name == "x"
    assert read_hostfile(str(tmp_path / "link"))[0].slots == 2


def _link_out(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _write(raw: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(raw)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo, os.mkdir, _link_out, _write(b"["), _write(b"[]"), _write(b"[" * 20_000),
        _write(b"\xff"), _write(b'{"shards": %s}' % DIGITS.encode()), _write(b"{}"),
        _write(b'{"shards": ["x"]}'), _write(b'{"shards": "\\u0000"}'),
    ],
)  # fmt: skip
def test_data_json_is_refused_as_ranks_read_it(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    run = RunDir(tmp_path)
    run.config.write_text(f"{RECIPE}data: {{source: stdlib}}\n")
    make(run.data)

    def read() -> object:
        job = reload_job(run, "lm")
        return job.workload.build_data(job.config, "train")

    refusal(read, DataError)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"title: {DIGITS}\n", "a number of 5001 digits"),
        ("null: 1\n", "null is not a key"),
        ("[]\n", "must be a map of keys"),
        ("title: !!python/name:os.system\n", "tag"),
        ("title: 1\n", "title"),
    ],
)
def test_a_target_is_refused_with_its_name(text: str, says: str) -> None:
    said = refusal(lambda: parse_target("mine", text), ConfigError)
    assert says in said and "mine" in said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("target: ${}", "a.yaml:3: ${} is not a reference"),
        ("overrides: ['name=${']", "a.yaml:3: name=${ is not a reference"),
        ("extras: 5", "extras"),
        ("extras: {a: 5}", "extras.a"),
        ("overrides: [[1]]", "overrides"),
        ("repeats: null", "repeats"),
        ("axes: {a: 1}", "axes"),
        ("null: 1", "a.yaml:3: null is not a key"),
    ],
)
def test_a_sweep_is_refused_with_its_key(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "a.yaml").write_text(f"recipe: lm_tiny\naxes: {{train.seed: [1, 2]}}\n{line}\n")
    said = refusal(lambda: read_spec(str(tmp_path / "a.yaml"), [], [], {}), ConfigError)
    assert says in said


def test_a_sweep_has_no_more_cells_than_anybody_waits_for(tmp_path: Path) -> None:
    axes = {f"launch.env.A{n}": list(range(10)) for n in range(9)}
    (tmp_path / "a.yaml").write_text(f"recipe: lm_tiny\naxes: {axes}\n")
    said = refusal(lambda: read_spec(str(tmp_path / "a.yaml"), [], [], {}), ConfigError)
    assert "1000000000 cells" in said and "hint: " in said


HEADER = "step,loss,lr,grad_norm,step_s,samples_per_s,tokens_per_s,skipped,warmup,val_loss\n"
ROW = "1,2.5,0.1,1,0.5,8,,0,0,\n"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (HEADER.encode() + b"\xff" + ROW.encode(), "not text in UTF-8"),
        (HEADER + ROW + f"2,{'x' * 140_000},0.1,1,0.5,8,,0,0,\n", "field larger"),
        (HEADER + "two,2.5,0.1,1,0.5,8,,0,0,\n", "column step"),
        (HEADER + "1.5,2.5,0.1,1,0.5,8,,0,0,\n", "column step"),
        (HEADER + f"{2**64},2.5,0.1,1,0.5,8,,0,0,\n", "column step"),
        (HEADER + f"{DIGITS},2.5,0.1,1,0.5,8,,0,0,\n", "column step"),
        (HEADER + "1e300,2.5,0.1,1,0.5,8,,0,0,\n", "column step"),
        (HEADER + "nan,2.5,0.1,1,0.5,8,,0,0,\n", "column step"),
        (HEADER + "1,1e300,0.1,1,0.5,8,,0,0,\n", "column loss"),
        (HEADER + "1,=2+2,0.1,1,0.5,8,,0,0,\n", "column loss"),
        ("loss,lr\n1,2\n", "no column step"),
    ],
)
def test_a_table_is_refused_with_its_column(tmp_path: Path, raw: str | bytes, says: str) -> None:
    path = tmp_path / "training.csv"
    path.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    said = refusal(lambda: read_training(path), DataError)
    assert says in said and "training.csv" in said and "hint: " in said


@pytest.mark.parametrize("cell", ["=2+2", "1e300"])
@pytest.mark.parametrize("num_rows", [40, 150_000])
def test_a_cell_that_is_damaged_is_named_by_its_line(
    tmp_path: Path, cell: str, num_rows: int
) -> None:
    """In a table that is read whole, and in one that is read in parts and by pyarrow."""
    rows = [f"{step},2.5,0.1,1,0.5,8,,0,0,\n" for step in range(1, num_rows + 1)]
    rows[-7] = f"{num_rows - 6},{cell},0.1,1,0.5,8,,0,0,\n"
    path = tmp_path / "training.csv"
    path.write_text(HEADER + "".join(rows))
    said = refusal(lambda: read_training(path), DataError)
    assert f"column loss of line {num_rows - 5}" in said, "the header is line 1"


@pytest.mark.parametrize("name", ["training.csv", "result.json", "ranks/rank0/steps.csv"])
def test_diagnose_says_what_is_damaged(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run")
    assert "damaged" not in {finding.kind for finding in diagnose(run.root).findings}
    path = run.root / name
    lines = path.read_text().splitlines()
    lines[len(lines) // 2] = "x" * 30 + "," * 60
    path.write_text("\n".join(lines) + "\n")
    (found,) = [f for f in diagnose(run.root).findings if f.kind == "damaged"]
    assert found.severity == "error" and f"{name} is damaged" in found.words and found.to_try


def test_half_a_character_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    body = MACHINE.to_json()
    path.write_text(body.replace('"box"', '"b\\u00e9 \\ud83d\\ude00"'))
    assert Env.load(path).host == "b\u00e9 \U0001f600"
    path.write_text(body.replace('"box"', '"b\\uD800x"'))
    assert "env.json is damaged" in refusal(lambda: Env.load(path), DataError)


@pytest.mark.parametrize("moment", ["inf", "nan", "", "1e200"])
def test_a_moment_is_a_moment(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "telemetry.csv"
    path.write_text(f"time,source,rss_bytes\n1.5,rank0,100\n{moment},rank0,100\n")
    assert "column time" in refusal(lambda: read_telemetry(path), DataError)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, _link_out])
def test_a_table_is_a_plain_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "training.csv")
    refusal(lambda: read_training(tmp_path / "training.csv"), DataError)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, _link_out, _write(b"step\n\xff\n")])
def test_no_row_is_written_behind_damage(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "training.csv")
    refusal(lambda: TableFile(tmp_path / "training.csv", TRAINING), DataError)


def test_a_byte_order_mark_is_no_part_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "training.csv"
    path.write_bytes(b"\xef\xbb\xbf" + (HEADER + ROW).encode())
    assert read_training(path)[0].step == 1


@pytest.mark.parametrize(
    "line", ["{", "[]", "[" * 20_000, '{"time": "x"}', '{"step": null}', f'{{"step": {DIGITS}}}']
)
def test_a_damaged_heartbeat_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "heartbeat_rank0.jsonl"
    path.write_text(f"{Beat(time=1.0).to_line()}{line}\n")
    assert "heartbeat_rank0.jsonl:2" in refusal(lambda: list(iter_beats(path)), DataError)
    assert last_beat(path) == Beat(), "a supervisor goes on"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, _link_out])
def test_heartbeats_logs_and_locks_are_plain_files(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """`watch` and `diagnose` waited for a FIFO, and read a link to /dev/zero until memory ended."""
    make(tmp_path / "file")
    assert last_beat(tmp_path / "file") == Beat()
    assert Tail(tmp_path / "file").lines() == []
    assert _log_end(tmp_path / "file") == ""
    assert _sure_after_s(tmp_path / "file") == math.inf


@pytest.mark.parametrize("raw", [b"\xff", b"[" * 20_000, b"[]", b'{"step": Infinity}', b"0"])
def test_passes_that_are_damaged_are_none(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "pipeline.jsonl").write_bytes(raw)
    assert read_passes(tmp_path / "pipeline.jsonl") == []
    os.unlink(tmp_path / "pipeline.jsonl")
    os.mkfifo(tmp_path / "pipeline.jsonl")
    assert read_passes(tmp_path / "pipeline.jsonl") == []


@pytest.mark.parametrize("change", [("repeat", "x"), ("repeat", ""), ("repeat", "-1")])
def test_a_manifest_of_a_sweep_is_refused_with_its_line(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    path = tmp_path / "run_manifest.tsv"
    row = dict.fromkeys(NEEDED, "1") | dict([change])
    save_manifest(path, [dict.fromkeys(NEEDED, "1"), row])
    assert "run_manifest.tsv:3: repeat" in refusal(lambda: load_manifest(path), DataError)
    path.write_bytes(b"\xff")
    assert "not text in UTF-8" in refusal(lambda: load_manifest(path), DataError)


@pytest.mark.parametrize("place", ["../../..", "/etc", "runs/../../x", ".", "link", ""])
def test_a_manifest_names_no_run_outside_of_its_sweep(tmp_path: Path, place: str) -> None:
    path = tmp_path / "sweep" / "run_manifest.tsv"
    path.parent.mkdir()
    (path.parent / "link").symlink_to(tmp_path)
    sound = dict.fromkeys(NEEDED, "1")
    save_manifest(path, [sound | {"run_dir": "runs/a..b_r1"}, sound | {"run_dir": "n/a"}])
    assert len(load_manifest(path)) == 2
    save_manifest(path, [sound, sound | {"run_dir": place}])
    said = refusal(lambda: load_manifest(path), DataError)
    assert f"run_manifest.tsv:3: run_dir is {place!r}" in said and "hint: " in said


@pytest.mark.parametrize("number", [0, -1, 10**9])
def test_a_plan_of_ranks_that_nobody_could_read_is_damage(tmp_path: Path, number: int) -> None:
    plan = make_plan(load_job("lm_tiny", []), MACHINE)
    plan.model_copy(update={"world_size": number}).save(tmp_path / "plan.json")
    assert "world_size" in refusal(lambda: Plan.load(tmp_path / "plan.json"), DataError)
    rank = RunDir(tmp_path).ranks / f"rank{10**9}"
    rank.mkdir(parents=True)
    assert read_evidence(RunDir(tmp_path)).num_ranks == 1


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", ""])
def test_a_step_that_took_no_time_is_damage(tmp_path: Path, value: str) -> None:
    run = make_run(tmp_path / "run")
    lines = run.training.read_text().splitlines()
    cells = lines[30].split(",")
    cells[4] = value
    lines[30] = ",".join(cells)
    run.training.write_text("\n".join(lines) + "\n")
    said = refusal(lambda: measure_run(run), DataError)
    assert "training.csv" in said and "step 30" in said


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("launch.nproc=10000000", "launch.nproc=10000000"),
        ("launch.nnodes=1000000000", "launch.nnodes=1000000000"),
        ("model.num_layers=10000000", "model.num_layers=10000000"),
        ("train.micro_batch_size=9000000000", "train.micro_batch_size=9000000000"),
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_numbers_that_nobody_could_wait_for_are_refused(
    override: str, says: str, strategy: str
) -> None:
    words = ["launch.nproc=2", f"strategy.name={strategy}", override]
    said = refusal(lambda: make_plan(load_job("lm_tiny", words), MACHINE), ConfigError)
    assert says in said


@pytest.mark.parametrize("recipe", ["lm_tiny", "nsa_tiny"])
def test_tables_of_positions_are_not_filled_by_a_plan(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 3e9 tokens are 12 GB and more."""
    monkeypatch.setattr(LM, "_rope_tables", lambda self: pytest.fail("they are filled"))
    words = ["data.seq_len=3000000000"]
    assert make_plan(load_job(recipe, words), MACHINE).units_per_sample == 3_000_000_000


def test_a_model_that_no_number_can_size_is_not_built() -> None:
    words = ["model.dim=3000000000"]
    said = refusal(lambda: make_plan(load_job("lm_tiny", words), MACHINE), ConfigError)
    assert "too large" in said and "can't allocate" not in said


def test_the_parts_of_a_large_batch_are_found_at_once() -> None:
    words = ["launch.nproc=2", "strategy.name=pipeline", "train.micro_batch_size=2147483647"]
    assert make_plan(load_job("lm_tiny", words), MACHINE).problems()
