"""Which steps of a live run are profiled: those of the config, and those that its file asks for."""

import logging
import os
from pathlib import Path

import pytest
import torch

from paceline.records.rundir import RunDir
from paceline.strategies.clock import HostClock
from paceline.train import profiling
from paceline.train.profiling import MAX_STEPS, Profiler


class Untraced:
    """In place of torch's profiler."""

    def __init__(self, **settings: bool) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...


class Asked:
    """A rank whose steps take no time; asked by its file."""

    def __init__(self, root: Path, configured: range | None = None) -> None:
        self.run, self.clock = RunDir(root), HostClock()
        self.run.profile_request.parent.mkdir(exist_ok=True)
        cpu = torch.device("cpu")
        self.profiler = Profiler(self.run, 0, self.clock, cpu, configured)
        self.num_asked = 0

    def ask(self, content: str | bytes) -> None:
        """Write the file, each time at another moment, and let it be looked at."""
        path, self.num_asked = self.run.profile_request, self.num_asked + 1
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        os.utime(path, ns=(self.num_asked, self.num_asked))
        self.profiler.requests.tick()

    def train(self, requests: dict[int, str], num_steps: int = 40) -> None:
        for step in range(self.clock.step + 1, num_steps + 1):
            self.clock.begin(step)
            self.profiler.begin(step)
            if step in requests:
                self.ask(requests[step])
            self.profiler.end(step)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the steps of each trace that was written."""
    found = list[str]()
    monkeypatch.setattr(profiling, "profile", Untraced)
    monkeypatch.setattr(profiling.ProfileRequests, "_steps_ahead", lambda self: 3)

    def export(trace: Untraced, path: Path, lost: object) -> None:
        found.append(path.name.removeprefix("rank0_steps").removesuffix(".json.gz"))

    monkeypatch.setattr(profiling, "_export", export)
    return found


CONFIGURED = range(30, 32)


@pytest.mark.parametrize(
    ("configured", "requests", "expected"),
    [
        (CONFIGURED, {}, ["30-31"]),
        (CONFIGURED, {8: "steps:10-11"}, ["10-11", "30-31"]),
        (CONFIGURED, {8: "steps:3-4"}, ["30-31"]),
        (CONFIGURED, {8: "steps:35-36"}, ["30-31", "35-36"]),
        (None, {8: "steps:10-12", 11: "steps:20-21"}, ["10-12", "20-21"]),
        (None, {8: "steps:10-20", 11: "2"}, ["10-20", "21-22"]),
        (None, {8: "2", 9: "2"}, ["11-12", "13-14"]),
        (CONFIGURED, {26: "3"}, ["30-31", "32-34"]),
        (None, {8: "steps:7-12"}, ["9-12"]),
        (None, {1: "steps:2-5"}, ["4-5"]),
    ],
)
def test_each_request_is_served_once_beside_the_config(
    configured: range | None,
    requests: dict[int, str],
    expected: list[str],
    traced: list[str],
    tmp_path: Path,
) -> None:
    Asked(tmp_path, configured).train(requests)
    assert traced == expected


UNREADABLE = [
    "x" * 300, "\u00b2", b"\xff\xfe", "9" * 150, "now", "-3", "steps:9-8", "steps:x", "steps:1-2",
]  # fmt: skip


@pytest.mark.parametrize("content", UNREADABLE)
def test_what_cannot_be_a_request_is_a_line_in_the_log(
    content: str | bytes, traced: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Asked(tmp_path)
    rank.train({}, num_steps=5)
    with caplog.at_level(logging.WARNING, "paceline"):
        rank.ask(content)
    (said,) = caplog.messages
    assert said.startswith("control/profile asks for nothing: ")
    rank.train({6: "1"})
    assert traced == ["9-9"], "the next one is served"


@pytest.mark.parametrize("content", ["1000000", "steps:20-1000000"])
def test_a_request_traces_a_hundred_steps_at_most(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Asked(tmp_path)
    with caplog.at_level(logging.WARNING, "paceline"):
        rank.ask(content)
    (steps,) = rank.profiler.requests.wanted
    assert len(steps) == MAX_STEPS == 100
    assert "100 are traced" in caplog.text
