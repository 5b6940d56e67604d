"""Profiles and memory dumps of real steps on one rank."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.errors import ConfigError, MemoryFull, Outcome
from paceline.records import RankVerdict
from paceline.records.files import write_atomic
from paceline.records.memory import MemoryDump
from paceline.records.rundir import RunDir
from paceline.report import write_report
from paceline.strategies.clock import HostClock
from paceline.traces.events import load_trace
from paceline.traces.flow import read_profile_facts
from paceline.train import profiling, ranges
from paceline.train.memory import count_at_peak, count_saved, let_go
from paceline.train.profiling import ProfileRequests
from tests.harness import run_here
from tests.machines import machine
from tests.parity import BATCH, SGD, tiny_model

TINY = [*tiny_model(), *SGD, *BATCH, "train.micro_batch_size=4"]


@pytest.mark.slow
def test_steps_are_profiled_and_memory_is_dumped(tmp_path: Path) -> None:
    settings = ["train.steps=7", "observe.profile=steps:5-6", "observe.memory=dumps"]
    ends = run_here(tmp_path / "run", "lm_tiny", [*TINY, *settings, "observe.memory_every=4"])
    run = ends.run
    trace = load_trace(run.profiles / "rank0_steps5-6.json.gz")
    assert [span.name for span in trace.steps] == ["ProfilerStep#5", "ProfilerStep#6"]
    phases = {span.name for span in trace.annotations}
    assert {"phase data", "phase forward", "phase backward", "phase optimizer"} <= phases
    machine().save(run.env)
    write_report(run)
    (facts,) = read_profile_facts(run)
    assert (facts.first_step, facts.last_step) == (5, 6)
    assert facts.categories["matrix products"] > 0 and facts.window_s >= facts.busy_s > 0
    assert "Profile of rank 0, steps 5 to 6" in run.summary.read_text()
    assert any("steps 5 to 6 were profiled" in note for note in ends.verdicts[0].notes)
    assert "ui.perfetto.dev" in run.report.read_text()
    boot, first = (MemoryDump.load(run.memory_dump(0, m)) for m in ("boot", "step1"))
    assert run.memory_dump(0, "step4").is_file() and not run.memory_dump(0, "step5").exists()
    assert len(first.owners) == 10 and first.by_kind["parameters"] == boot.by_kind["parameters"]
    held = sum(w.numel() * 4 for name, w in ends.states[0].weights.items() if "rope" not in name)
    assert first.by_kind["parameters"] == held
    assert (run.root / "opt_state_mb.txt").is_file()


def test_a_profile_may_not_begin_before_the_audit_is_over(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="step 3 is profiled for the audit"):
        run_here(tmp_path / "run", "lm_tiny", [*TINY, "train.steps=7", "observe.profile=steps:2-5"])


OUT_OF_MEMORY = """
import torch
from torch import nn
from paceline import Workload

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.greedy = nn.Linear(4, 64), Greedy()
    def forward(self, x): return self.greedy(self.first(x))

class Greedy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 1)
    def forward(self, x):
        y = torch.relu(self.inner(x))
        torch.empty(1 << 60)
        return y

class Job(Workload):
    def build_model(self, config): return Deep()
    def build_data(self, config, split):
        return [torch.full((4,), n / 64) for n in range(64)] if split == "train" else None
    def loss(self, model, batch): return model(batch).sum(), len(batch)
"""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[torch.Tensor]]]:
    """What torch.relu returns meanwhile, while nobody collects garbage."""
    relu, seen = torch.relu, list[weakref.ref[torch.Tensor]]()

    def noted(x: torch.Tensor) -> torch.Tensor:
        y = relu(x)
        seen.append(weakref.ref(y))
        return y

    monkeypatch.setattr(torch, "relu", noted)
    gc.disable()
    yield seen
    gc.enable()


def test_where_memory_runs_out_its_owners_are_written(
    tmp_path: Path, made: list[weakref.ref[torch.Tensor]]
) -> None:
    (tmp_path / "job.py").write_text(OUT_OF_MEMORY)
    settings = ["train.steps=3", "train.micro_batch_size=8", "data.num_workers=0"]
    with pytest.raises(MemoryFull, match="can't allocate memory") as raised:
        run_here(tmp_path / "run", f"{tmp_path / 'job.py'}:Job", [*settings, "launch.device=cpu"])
    assert any(entry.name == "forward" for entry in raised.traceback)
    assert made and not any(y() is not None for y in made), "the error holds what a step has made"
    run = RunDir(tmp_path / "run")
    dump = MemoryDump.load(run.memory_dump(0, "oom"))
    assert dump.inside == "greedy" and dump.by_kind["parameters"] == 4 * (4 * 64 + 64 + 64 + 1)
    # What was saved for the weight of greedy.inner: its input, 8 samples of 64 numbers.
    saved = {o.module: o.num_bytes for o in dump.owners if o.kind == "activations"}
    assert saved["greedy.inner"] >= 8 * 64 * 4
    verdict = RankVerdict.load(run.verdict(0))
    assert verdict.outcome is Outcome.OUT_OF_RESOURCES and verdict.error is not None
    assert "in the forward pass of greedy" in verdict.error.message
    assert "hint: " in verdict.error.message


def test_what_an_error_holds_is_let_go_and_nothing_else() -> None:
    """Errors may come from each other in a circle; a module's names are not the error's."""
    module: dict[str, object] = {"kept": [1]}
    try:
        exec("raise MemoryError(str(kept))", module)
    except MemoryError as error:
        other = ValueError()
        other.__cause__, error.__cause__ = error, other
        let_go(error)
        error.__cause__ = None
    assert module["kept"] == [1]


def test_what_autograd_has_saved_belongs_to_the_weights_that_use_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    try:
        with torch.autocast("cpu", torch.bfloat16):  # weights are used through a cast and a view
            hidden = model(torch.ones(16, 8))
            raise MemoryError(str(hidden.shape))
    except MemoryError as error:
        held = count_saved(error, model)
    # In bf16: the input of each; the second one's weight, too; and what GELU keeps of its own input
    # goes to the layer that comes after it.
    assert held["0", "activations"] == 2 * (16 * 8)
    assert held["2", "activations"] == 2 * (16 * 32 + 32 + 16 * 32)
    assert set(held) == {("0", "activations"), ("2", "activations")}


def test_a_request_names_steps_ahead_for_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "control" / "profile"
    path.parent.mkdir()
    path.write_text("steps:1-2\n")  # of a run before
    clock = HostClock()
    first, other = (ProfileRequests(path, clock, is_first=rank == 0) for rank in (0, 1))
    clock.step = 100
    for each in (first, other):
        each.tick()
        assert each.wanted == []
    path.write_text("")
    time.sleep(0.01)
    other.tick()
    assert other.wanted == [], "rank 0 says which steps are meant"
    first.tick()
    assert first.wanted == [], "what is empty may be about to be written"
    first.tick()
    other.tick()
    assert first.wanted == other.wanted
    (steps,) = first.wanted
    assert len(steps) == 5 and steps[0] > 101
    later = steps[-1] + 200
    path.write_text(f"steps:{later}-{later + 1}")
    other.tick()
    assert other.wanted == [steps, range(later, later + 2)]


@pytest.mark.slow
def test_a_live_run_is_profiled_when_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "AHEAD_S", 0.1)
    run = RunDir(tmp_path / "run")

    def ask() -> None:
        while not run.training.exists():
            time.sleep(0.02)
        run.profile_request.parent.mkdir(exist_ok=True)
        write_atomic(run.profile_request, "2")  # one that is empty asks for the usual 5

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    slow = ["train.steps=100000", "train.log_every=1", "launch.device=cpu"]
    stop = threading.Thread(target=_stop_when_there, args=(run,), daemon=True)
    stop.start()
    run_here(run.root, "lm_tiny", [*TINY, *slow, "checkpoint.at_stop=false"])
    (trace,) = run.profiles.glob("rank0_steps*.json.gz")
    assert len(load_trace(trace).steps) == 2


def _stop_when_there(run: RunDir) -> None:
    deadline = time.monotonic() + 60
    while not list(run.profiles.glob("rank0*.gz")) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.halt.write_text("")


def test_what_was_held_at_the_peak() -> None:
    history = [
        {"action": "alloc", "addr": 1, "size": 100, "user_metadata": "blocks.0"},
        {"action": "alloc", "addr": 2, "size": 50, "user_metadata": "blocks.1"},
        {"action": "alloc", "addr": 3, "size": 7, "user_metadata": ""},
        {"action": "free_requested", "addr": 1, "size": 100},
        {"action": "free_completed", "addr": 1, "size": 100},
        {"action": "alloc", "addr": 1, "size": 20, "user_metadata": "blocks.2"},
    ]
    held = count_at_peak(history)
    assert held["blocks.0", "activations"] == 100 and held["blocks.1", "activations"] == 50
    assert sum(held.values()) == 157 and ("blocks.2", "activations") not in held


def test_nvtx_ranges_for_phases_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    nvtx = torch.cuda.nvtx
    monkeypatch.setattr(nvtx, "range_push", lambda name: told.append(f"+{name}"))
    monkeypatch.setattr(nvtx, "range_pop", lambda: told.append("-"))
    monkeypatch.setattr(nvtx, "range_start", lambda name: told.append(f"[{name}") or len(told))
    monkeypatch.setattr(nvtx, "range_end", lambda handle: told.append("]"))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    clock, model = HostClock(), Model()
    ranges.mark_by_nvtx(model, clock)
    clock.begin(1)
    clock.enter("forward")
    model(torch.ones(1, 2))
    clock.enter("backward")
    assert told == [
        "[phase data", "]", "[phase forward", "+blocks.0", "-", "+blocks.1", "-", "]",
        "[phase backward",
    ]  # fmt: skip
