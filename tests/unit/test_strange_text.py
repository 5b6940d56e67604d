"""Text of others, such as names and exceptions, on its way to a screen, a page or a spreadsheet:
nothing in it is acted upon."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.talk import ConsoleTalk, print_problems, say_failure
from paceline.errors import ConfigError
from paceline.launch.follow import Follower
from paceline.launch.supervisor import log_line
from paceline.records import Failure
from paceline.records.table_file import TableFile
from paceline.records.tables import CHECKPOINTS, read_table
from paceline.records.words import from_cell, plain, text_cell, visible
from paceline.report import write_report
from paceline.sweep.folder import SweepDir, load_manifest, save_manifest
from paceline.sweep.outputs import write_outputs
from paceline.sweep.spec import SweepSpec, draw_cells
from tests.reported import finish, write_run
from tests.sweeps import draw_cell, draw_figures, draw_record, draw_row, judge_rows

RED = "\x1b[31mred\x1b[0m \x9b2J \x07 \u202eevil"
SHOWN = "\\x1b[31mred\\x1b[0m \\x9b2J \\x07 \\u202eevil"
FORMULA = "=HYPERLINK(0)"


def is_clean(text: str) -> bool:
    return not set(text) & set("\x1b\x9b\x07\x7f\u202e")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (RED, SHOWN), ("a\tb\nc", "a\tb\nc"), ("dos\r\n", "dos\n"),
        ("over\rwritten", "over\\rwritten"),
        ("\x00\x7f\x85\u2028", "\\x00\\x7f\\x85\\u2028"),
        ("Größe µs 模型 👩\u200d🚀", "Größe µs 模型 👩\u200d🚀"),
        ("half \ud83d", "half \\ud83d"),
    ],
)  # fmt: skip
def test_what_a_terminal_would_act_on_is_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown == visible(shown)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        (FORMULA, f"'{FORMULA}"), ("@SUM(1)", "'@SUM(1)"), ("-x", "'-x"), ("+x", "'+x"),
        ("  =1", "'=1"),
        ("'=1", "''=1"), ("-1.5", "-1.5"), ("+3e5", "+3e5"), ("a=1", "a=1"),
        ("it's", "it's"), ("", ""),
    ],
)  # fmt: skip
def test_a_text_is_never_a_formula_and_a_number_stays_one(text: str, cell: str) -> None:
    assert text_cell(text) == cell
    assert from_cell(cell) == text.strip()


def test_one_line_of_markdown(tmp_path: Path) -> None:
    assert plain(f"{RED}\n|") == f"{SHOWN.replace('[', chr(92) + '[')} \\|"


def test_a_screen_shows_names_exceptions_and_logs_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    run.rank_log(0).write_text(f"log {RED}\n")
    failure = Failure(
        rank=0, host=RED, step=1, phase="forward", message=f"ValueError: {RED}", others=[RED],
        log="ranks/rank0/log.txt",
    )  # fmt: skip
    say_failure(ConsoleTalk(), finish(run).model_copy(update={"failure": failure}))
    print_problems(ConfigError(f"there is no key {RED}"))
    said = capsys.readouterr().err
    assert is_clean(said)
    assert said.count(SHOWN) == 5, "host, message, other, log, key"


def test_pages_logs_and_tables_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.config.write_text(f"# asked: {RED!r}\nname: x\ntrain:\n  log_every: 5\n")
    failure = Failure(
        rank=0, host="box", step=1, phase="forward", message=f"ValueError: {RED}", others=[RED],
        log="",
    )  # fmt: skip
    finish(run).model_copy(update={"failure": failure, "notes": [RED]}).save(run.result)
    write_report(run)
    assert is_clean(run.summary.read_text()) and is_clean(run.report.read_text())
    assert SHOWN in run.report.read_text() and "\\x1b" in run.summary.read_text()
    follower = Follower(run, 1, lambda row: None)
    with run.rank_log(0).open("a") as log:
        log.write(f"{RED}\n")
    follower.tick()
    log_line(run, RED)
    assert run.train_log.read_text() == f"[rank 0] {SHOWN}\n"
    assert run.launcher_log.read_text().endswith(f"{SHOWN}\n")


def test_a_locale_that_lacks_characters_costs_no_page_and_no_screen(tmp_path: Path) -> None:
    run = write_run(tmp_path / "Größe")
    finish(run)
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in (["report"], ["watch", "--once"]):
        command = [sys.executable, "-m", "paceline", *words, str(run.root)]
        ended = subprocess.run(command, env=os.environ | plain, capture_output=True, check=False)
        assert ended.returncode == 0, ended.stderr.decode(errors="replace")
    page = run.report.read_text(encoding="utf-8")
    assert "Größe" in page and "\ufffd" not in page


def test_a_table_of_a_run_keeps_texts_that_look_like_formulas(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.csv"
    file = TableFile(path, CHECKPOINTS)
    file.add({"step": -1, "reason": FORMULA, "stall_s": -0.5, "error": f"-{RED}"})
    file.close()
    with path.open(newline="") as opened:
        (row,) = csv.DictReader(opened)
    assert row["reason"] == f"'{FORMULA}" and row["error"] == f"'-{SHOWN}"
    assert (row["step"], row["stall_s"]) == ("-1", "-0.5"), "numbers are numbers"
    assert read_table(path, CHECKPOINTS).column("reason")[0] == FORMULA


def test_all_outputs_of_a_sweep(tmp_path: Path) -> None:
    folder = SweepDir(tmp_path / "sweep")
    folder.runs.mkdir(parents=True)
    spec = SweepSpec(recipe="lm_tiny", axes={"name": [RED]})
    (cell,) = draw_cells(spec)
    refused = draw_cell({"data.num_workers": "9"}, refusal=FORMULA)
    record = draw_record({"name": [RED]}, cells=[cell, refused])
    rows = [draw_row(folder, cell.name, 1, dataset_manifest_path="@home/data")]
    save_manifest(folder.manifest, rows)
    assert load_manifest(folder.manifest) == rows, "the guard is taken off again"
    judgement = judge_rows(record, rows, {rows[0]["run_dir"]: draw_figures(10.0)})
    write_outputs(folder, record, rows, judgement)
    tables = [
        folder.manifest,
        folder.per_run,
        folder.points,
        folder.groups,
        folder.ranked,
        folder.skipped,
    ]
    for path in (*tables, folder.summary, folder.report):
        assert is_clean(path.read_text()), path.name
    for path in tables:
        with path.open(newline="") as opened:
            for line in csv.reader(opened, delimiter="\t" if path.suffix == ".tsv" else ","):
                assert not [each for each in line if each.startswith(("=", "@"))], path.name
    assert f"'{FORMULA}" in folder.skipped.read_text()
