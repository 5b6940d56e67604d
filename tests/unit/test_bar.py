"""What a terminal shows of a live run, drawn from its files."""

import io
from pathlib import Path

from rich.console import Console

from paceline.cli.bar import Bar
from paceline.records.rundir import RunDir
from paceline.records.table_file import TableFile
from paceline.records.tables import TELEMETRY
from tests.machines import plan

ROW = {
    "step": "30", "loss": "2.5", "lr": "0.1", "step_s": "0.5", "samples_per_s": "16",
    "tokens_per_s": "2048", "skipped": "0", "warmup": "0", "val_loss": "", "val/accuracy": "",
}  # fmt: skip


def make(folder: Path, width: int = 80, *words: str) -> tuple[Bar, RunDir, Console]:
    run = RunDir(folder)
    run.make_rank(0)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True)
    made = plan("train.steps=100", "name=fixture", *words)
    return Bar(console, run, made), run, console


def shown(bar: Bar, console: Console) -> list[str]:
    with console.capture() as captured:
        console.print(bar.draw())
    return [line.rstrip() for line in captured.get().splitlines()]


def test_before_the_first_row(tmp_path: Path) -> None:
    bar, _, console = make(tmp_path)
    first, second = shown(bar, console)
    assert first.startswith("fixture") and "0/100" in first and second == "starting ranks"


def test_all_that_people_look_for(tmp_path: Path) -> None:
    bar, run, console = make(tmp_path, 80, "observe.peak_flops=1e12")
    run.flops.write_text("1e9\n")
    table = TableFile(run.telemetry, TELEMETRY)
    for bytes_ in (2**20, 3 * 2**20, 2**20):
        table.add({"time": 1.0, "source": "host", "memory_bytes": 2**35, "rss_bytes": bytes_})
    table.close()
    bar.update(ROW | {"val_loss": "2.25", "val/accuracy": "0.75"})
    bar.update(ROW | {"step": "40", "loss": "2.4"})
    first, second, third = shown(bar, console)
    assert "40/100" in first and first.endswith("about 30 s left"), "60 steps of 0.5 s"
    assert second == "loss 2.4  validation 2.25  val/accuracy 0.75", "the last evaluation stays"
    # 8 samples a step: 1e9 x 8 / 0.5 s of 1e12.
    assert third == "2,048 tokens/s  500 ms/step  MFU 1.6%  peak 3 MiB"


def test_warm_up_says_nothing_of_the_time_left(tmp_path: Path) -> None:
    bar, _, console = make(tmp_path)
    bar.update(ROW | {"warmup": "1", "step_s": "50"})
    first, _, third = shown(bar, console)
    assert "left" not in first and "MFU" not in third, "the peak of a CPU is not known"


def test_a_narrow_terminal_cuts_lines_and_wraps_none(tmp_path: Path) -> None:
    bar, _, console = make(tmp_path, width=30)
    bar.update(ROW | {f"val/metric{n}": "0.5" for n in range(9)})
    assert len(shown(bar, console)) <= 4
    assert any(line.endswith("…") for line in shown(bar, console))
