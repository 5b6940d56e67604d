"""Following files that attempts cut and append to."""

from pathlib import Path

from paceline.launch.archive import archive_left_over, begin_attempt
from paceline.launch.follow import Follower
from paceline.records.rundir import RunDir
from paceline.records.table_file import TableFile
from paceline.records.tables import TRAINING
from paceline.records.tails import Tail


def test_a_file_that_has_become_shorter_is_told_from_its_new_end(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("step\n1\n2\n3\n")
    tail = Tail(path)
    assert tail.lines() == ["step", "1", "2", "3"]
    path.write_text("step\n1\n")  # the next attempt goes on from step 1
    assert tail.lines() == []
    with path.open("a") as file:
        file.write("2\n3\n4\n")
    assert tail.lines() == ["2", "3", "4"]


def test_a_new_column_loses_no_row_and_tells_none_twice(tmp_path: Path) -> None:
    run, told = RunDir(tmp_path), list[dict[str, str]]()
    file = TableFile(run.training, TRAINING)
    file.add({"step": 1})
    file.flush()
    follower = Follower(run, 1, told.append)  # what is there already is not told
    file.add({"step": 2})
    file.flush()
    follower.tick()
    file.add({"step": 3})
    file.widen(["val/accuracy"])
    file.add({"step": 4, "val/accuracy": 0.5})
    file.flush()
    follower.tick()
    assert [row["step"] for row in told] == ["2", "3", "4"]
    assert told[-1]["val/accuracy"] == "0.5" and told[-2]["val/accuracy"] == ""


def test_rows_that_are_there_already_are_not_replayed(tmp_path: Path) -> None:
    run, told, said = RunDir(tmp_path), list[dict[str, str]](), list[str]()
    run.training.write_text("step,loss\n" + "".join(f"{n},0.5\n" for n in range(1, 1001)))
    run.rank_log(0).parent.mkdir(parents=True)
    run.rank_log(0).write_text("said before\n")
    begin_attempt(run, resume=False)
    follower = Follower(run, 1, told.append, said.append)
    run.training.write_text("step,loss\n" + "".join(f"{n},0.5\n" for n in range(1, 901)))
    follower.tick()
    assert told == [], "rows of the attempt before are not progress: its checkpoint was at 900"
    with run.training.open("a") as file:
        file.write("901,0.4\n")
    archive_left_over(run)
    begin_attempt(run, resume=True)
    follower.tick()
    assert [row["step"] for row in told] == ["901"]
    assert said == [
        "cut off: its supervisor was killed, or the machine went down\n"
        "starting all ranks again: attempt 2"
    ]
    assert run.train_log.read_text() == ""


def test_what_cannot_be_followed_is_said_once_and_the_rest_goes_on(tmp_path: Path) -> None:
    def refuse(row: dict[str, str]) -> None:
        raise KeyError("loss")

    run, said = RunDir(tmp_path), list[str]()
    run.rank_log(0).parent.mkdir(parents=True)
    follower = Follower(run, 1, refuse, said.append)
    file = TableFile(run.training, TRAINING)
    for step in (1, 2):
        file.add({"step": step})
        file.flush()
        with run.rank_log(0).open("a") as log:
            log.write(f"line {step}\nTimingRank step={step} rank=0 loss=0.5 fwd=80.12ms\n")
        follower.tick()
    with run.rank_log(0).open("a") as log:
        log.write("the last")
    follower.start()
    follower.stop()
    assert [line[:17] for line in run.train_log.read_text().splitlines()] == [
        "[rank 0] line 1", "[rank 0] TimingRa", "[rank 0] line 2", "[rank 0] TimingRa",
        "[rank 0] the last",
    ]  # fmt: skip
    assert said == ["warning: some of the run could not be followed (KeyError: 'loss'); it goes on"]
