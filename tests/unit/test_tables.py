"""Tables of a run: columns by name, other versions, half lines, long files."""

import math
import re
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.launch.deadlines import _order
from paceline.records import cells, tables
from paceline.records.heartbeats import Beat, iter_beats, last_beat
from paceline.records.phases import STEP_PHASES, Phase
from paceline.records.table_file import TableFile
from paceline.records.tables import (
    CHECKPOINTS,
    SAMPLES,
    STEPS,
    TELEMETRY,
    TRAINING,
    read_checkpoints,
    read_steps,
    read_telemetry,
    read_training,
)

CSS = Path(__file__).parents[2] / "paceline" / "report" / "report.css"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.csv"


def training_row(step: int, **more: float | None) -> dict[str, str | float | None]:
    return {
        "step": step,
        "loss": 1 / 3,
        "step_s": 0.5,
        "skipped": False,
        "warmup": step == 1,
        **more,
    }


def test_what_is_written_by_name_is_read_by_name(path: Path) -> None:
    file = TableFile(path, TRAINING)
    file.add(training_row(1, tokens_per_s=64.0))
    file.add(training_row(2, val_loss=math.nan))
    file.close()
    first, second = read_training(path)
    assert (first.step, first.warmup, first.tokens_per_s, first.val_loss) == (1, True, 64.0, None)
    assert first.loss == pytest.approx(1 / 3, rel=1e-9)
    # A validation loss that is no number was measured; one that is empty was not.
    assert second.val_loss is not None and math.isnan(second.val_loss)
    with pytest.raises(AssertionError, match="lost"):
        TableFile(path, TRAINING).add({"step": 3, "lost": 1.0})


def test_a_table_of_another_version_is_read(path: Path) -> None:
    """Fewer columns, in another order, and one that nobody knows here."""
    path.write_text("loss,colour,step\n0.5,red,1\n0.25,blue,2\n")
    last = read_training(path)[-1]
    assert (last.step, last.loss, last.tokens_per_s, last.skipped) == (2, 0.25, None, False)
    assert math.isnan(last.grad_norm)
    path.write_text("step,wall_s,forward_s\n7,0.5,0.25\n")
    (row,) = read_steps(path)
    assert row.phases_s == dict.fromkeys(STEP_PHASES, 0.0) | {Phase.FORWARD: 0.25}
    path.write_text("time,source,power_w\n1.5,gpu0,300\n2.5,host,\n")
    assert [row.values for row in read_telemetry(path)] == [{"power_w": 300.0}, {}]


@pytest.mark.parametrize("block", [7, 64, 2**16])
def test_the_last_rows_are_read_without_the_others(
    path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "LAST_BYTES", block)
    rows = "".join(f"{step},{step / 8}\n" for step in range(1, 101))
    path.write_text("step,wall_s\n" + rows + "101,0.")
    for last in (0, 1, 3, 99, 100, 1000):
        want = list(range(1, 101))[max(0, 100 - last) :]
        assert read_steps(path, last).column("step").tolist() == want
    path.write_text("\ufeffstep,wall_s\nx,y\n" + rows)
    assert len(read_steps(path, 100)) == 100, "what is damaged before them is not looked at"
    path.write_text("step,wall_s\n" + rows + "x,y\n")
    with pytest.raises(DataError, match="line 102"):
        read_steps(path, 5)
    path.write_text("step,wall_s\n")
    assert len(read_steps(path, 5)) == len(read_steps(path.with_name("absent"), 5)) == 0


def test_a_resume_drops_no_row_whose_header_differs(path: Path) -> None:
    """Found in 0.6: of 100 rows under a header with a column less, none was left."""
    rows = "".join(f"red,{step},{step / 10}\n" for step in range(1, 101))
    path.write_text("colour,step,loss\n" + rows)
    file = TableFile(path, TRAINING, kept=90)
    file.add(training_row(91))
    file.close()
    assert [row.step for row in read_training(path)] == list(range(1, 92))
    assert read_training(path)[89].loss == 9.0
    lines = path.read_text().splitlines()
    assert lines[0].startswith("colour,step,loss,lr,grad_norm,step_s,")
    assert lines[1] == "red,1,0.1,,,,,,,,," and lines[-1].startswith(",91,0.3333333333,")


def test_half_a_line_is_cut_and_a_file_that_fits_is_left_alone(path: Path) -> None:
    TableFile(path, SAMPLES).close()
    with path.open("a") as file:
        file.write("1,0,5 6\n2,0,7 8\n3,0,9 1")
    TableFile(path, SAMPLES, kept=2).close()
    assert path.read_text() == "step,microbatch,sample_ids\n1,0,5 6\n2,0,7 8\n"
    before = path.stat().st_ino
    TableFile(path, SAMPLES, kept=2).close()
    assert path.stat().st_ino == before
    TableFile(path, SAMPLES, kept=0).close()
    assert path.read_text() == "step,microbatch,sample_ids\n"


def test_a_resume_cuts_a_long_table_in_place(path: Path) -> None:
    """As a whole in memory, 50,000 rows were 20 MB; a run of a million steps has twenty times as
    many, and each of its ranks reads them when it resumes."""
    rows = "".join(f"{step},0,{step}\n" for step in range(1, 50_001))
    path.write_text("step,microbatch,sample_ids\n" + rows)
    node = path.stat().st_ino
    tracemalloc.start()
    TableFile(path, SAMPLES, kept=49_990).close()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.read_text().endswith("\n49990,0,49990\n")
    assert path.stat().st_ino == node, "the file was written anew"
    assert peak_bytes < 2**20


def test_rows_that_somebody_has_put_out_of_order_are_kept(path: Path) -> None:
    path.write_text("step,microbatch,sample_ids\n1,0,5\n7,0,6\n2,0,7\n")
    TableFile(path, SAMPLES, kept=3).close()
    assert path.read_text() == "step,microbatch,sample_ids\n1,0,5\n2,0,7\n"


def test_an_evaluation_is_put_into_the_last_row_in_place(path: Path) -> None:
    file = TableFile(path, TRAINING)
    for step in range(1, 2001):
        file.add(training_row(step))
    file.flush()
    before, node = path.read_bytes(), path.stat().st_ino
    for loss in (2.5, 2.25, 3.0, 1 / 7):  # another value may be longer or shorter
        file.amend_last("val_loss", loss)
    file.add(training_row(2001))
    file.close()
    rows = read_training(path)
    assert path.stat().st_ino == node, "the file was written anew"
    assert path.read_bytes()[: len(before) - 1] == before[:-1]
    assert [row.val_loss for row in rows[-3:]] == [None, pytest.approx(1 / 7), None]
    assert len(rows) == 2001


def test_metrics_are_columns_that_come_when_they_are_first_known(path: Path) -> None:
    file = TableFile(path, TRAINING)
    file.add(training_row(1))
    file.widen(["train/accuracy", "val/accuracy"])
    file.add(training_row(2, **{"train/accuracy": 0.25}))
    file.widen(["val/accuracy"])
    file.amend_last("val/accuracy", 0.5)
    file.close()
    rows = read_training(path)
    assert [row.metrics for row in rows] == [{}, {"train/accuracy": 0.25, "val/accuracy": 0.5}]
    assert rows[-1].metrics == {"train/accuracy": 0.25, "val/accuracy": 0.5}
    assert rows.metrics == ["train/loss", "val/loss", "train/accuracy", "val/accuracy"]
    assert [part.tolist() for part in rows.metric("val/accuracy")] == [[2], [0.5]]
    assert [part.tolist() for part in rows.metric("val/loss")] == [[], []]
    assert rows.metric("train/loss")[0].tolist() == [1, 2]
    header = path.read_text().splitlines()[0]
    assert header.endswith(",val_loss,train/accuracy,val/accuracy")
    TableFile(path, TRAINING, kept=1).close()  # a resume cuts rows, and keeps columns
    assert path.read_text().splitlines()[0] == header and len(read_training(path)) == 1


def test_what_is_no_number_is_said(path: Path) -> None:
    path.write_text("step,loss\n1,0.5\n2,zero\n")
    with pytest.raises(DataError, match="table.csv is damaged: column loss .*'zero'"):
        read_training(path)
    path.write_text("alpha,beta\n1,0.5\n")
    with pytest.raises(DataError, match="no column step"):
        read_training(path)
    assert len(read_training(path.with_name("absent.csv"))) == 0


def test_errors_with_commas_and_quotes_stay_in_their_cell(path: Path) -> None:
    file = TableFile(path, CHECKPOINTS)
    file.add({"step": 3, "outcome": "failed", "error": 'rank 1: no "space"\nleft, at all'})
    file.add({"step": 6, "outcome": "ok", "num_bytes": 123456789012345, "stall_s": "0.2500"})
    file.close()
    failed, written = read_checkpoints(path)
    assert (failed.step, failed.is_written, written.is_written) == (3, False, True)
    assert (written.num_bytes, written.stall_s) == (123456789012345, 0.25)


def test_a_slice_is_a_table_and_steps_can_be_left_out(path: Path) -> None:
    file = TableFile(path, STEPS)
    for step in range(1, 11):
        file.add({"step": step, "wall_s": step / 10, "comm_s": 0.5})
    file.close()
    rows = read_steps(path)
    assert [row.step for row in rows[-3:]] == [row.step for row in rows.since(8)] == [8, 9, 10]
    assert rows.since(8).column("comm_s").tolist() == [0.5, 0.5, 0.5]
    assert [row.step for row in rows.pick(rows.column("wall_s") > 0.85)] == [9, 10]


def test_large_counts_keep_their_digits(path: Path) -> None:
    file = TableFile(path, TELEMETRY)
    file.add({"time": f"{1790000000.125:.3f}", "source": "host", "memory_bytes": 123456789012})
    file.close()
    (row,) = read_telemetry(path)
    assert (row.time, row.values) == (1790000000.125, {"memory_bytes": 123456789012.0})


def test_every_phase_has_a_colour_and_a_place() -> None:
    classes = set(re.findall(r"\.([a-z]+[0-9]?)", CSS.read_text()))
    assert {*STEP_PHASES, "unaccounted"} <= classes
    assert [_order(phase) for phase in Phase] == list(range(len(Phase)))
    assert _order("a phase of tomorrow") == len(Phase)


def test_beats_of_any_version(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat_rank0.jsonl"
    assert last_beat(path) == Beat() and list(iter_beats(path)) == []
    now = Beat(5.0, 1, 3, Phase.COMM, 17)
    path.write_text('{"time": 4, "step": 2, "mood": "fine"}\n' + now.to_line() + '{"ti')
    assert list(iter_beats(path)) == [Beat(time=4, step=2), now]
    assert last_beat(path) == now


READ = """
import resource, sys
from pathlib import Path
from paceline.records.tables import read_steps
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = read_steps(Path(sys.argv[1]))
assert len(rows) == 200_000 and rows[-1].step == 200_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_long_tables_take_little_memory(path: Path) -> None:
    """200,000 rows of 20 numbers are 35 MB as columns; as dicts of rows 11 were over 150 MB."""
    assert resource.getpagesize()  # ru_maxrss is in KiB where this runs
    header = ",".join(STEPS.columns)
    kinds = list(STEPS.columns.values())[2:]
    cells = "".join(",7" if kind is int else ",0.0123456789" for kind in kinds)
    path.write_text(header + "\n" + "".join(f"{n},0{cells}\n" for n in range(1, 200_001)))
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 80 * 1024


@pytest.mark.parametrize("few", [0, 2**20], ids=["by pyarrow", "cell by cell"])
def test_large_tables_read_as_small_ones_do(
    few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty cells, what is not a number, a row with a cell too few, a column that is absent."""
    monkeypatch.setattr(cells, "FEW_LETTERS", few)
    path = tmp_path / "training.csv"
    path.write_text(
        "step,loss,lr,grad_norm,step_s,samples_per_s,skipped,warmup,val_loss,train/parts,new\n"
        "1,2.5,1e-3,nan,0.1,8,0,1,,0.25,7\n"
        "2,inf,1e-3,-1.5,0.1,8,1,0,1.5,,\n"
        "\n"
    )
    first, second = read_training(path)
    assert (first.step, first.loss, first.skipped, first.warmup) == (1, 2.5, False, True)
    assert math.isnan(first.grad_norm) and first.val_loss is None and first.tokens_per_s is None
    assert (second.loss, second.grad_norm, second.val_loss) == (math.inf, -1.5, 1.5)
    assert (first.metrics, second.metrics) == ({"train/parts": 0.25}, {})
    with path.open("a") as file:
        file.write("3,1,1\n4,1,1e-3,1,0.1,8,0,0,,,\n5,1")
    assert [row.step for row in read_training(path)] == [1, 2, 4], "rows that were cut off are none"
    path.write_text(path.read_text().replace("\n4,", "\n4.5,"))
    with pytest.raises(DataError, match="column step"):
        read_training(path)


@pytest.mark.parametrize("few", [0, 2**20], ids=["by pyarrow", "cell by cell"])
def test_large_tables_with_texts_read_as_small_ones_do(
    few: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts: some of them often, one that is guarded, one with a comma; and none at all."""
    parsed, by_cell = list[str](), cells._parse_cells

    def parse(path: Path, text: str, *more: Any) -> cells.Chunk:
        parsed.append(text)
        return by_cell(path, text, *more)

    monkeypatch.setattr(cells, "FEW_LETTERS", few)
    monkeypatch.setattr(cells, "_parse_cells", parse)
    path.write_text("time,source,power_w\n1,host,\n1,gpu0,300\n2,host,\n2,'=1+x,5\n3,,\n")
    rows = read_telemetry(path)
    assert rows.column("source").tolist() == ["host", "gpu0", "host", "=1+x", ""]
    assert bool(parsed) == (few > 0), "by the way that is named"
    assert [row.values for row in rows][:2] == [{}, {"power_w": 300.0}]
    path.write_text('time,source,power_w\n1,"a, b",2\n')
    assert read_telemetry(path).column("source").tolist() == ["a, b"]
    path.write_text("time,power_w\n1,2\n")
    assert read_telemetry(path).column("source").tolist() == [""]
    path.write_text("time,source,power_w\nx,host,2\n")
    with pytest.raises(DataError, match="column time of line 2"):
        read_telemetry(path)
