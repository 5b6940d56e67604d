"""The faults: each strikes a run that is stepping, and the run must go on, by itself or resumed.

A fault is one function of a program and a random generator; it returns whom it struck. What is
drawn depends on the seed alone. Two faults alike at one step would end the run by design, so
`Storm` lets the run step past one before the next strikes.
"""

import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.folder import TEMPORARY
from soaking.program import PREEMPTED, START_S, STOP_S, Program, SoakError

SAVE_S, KILLED = 30.0, -signal.SIGKILL
PAST = 12  # steps; more than a heartbeat may be behind

Strike = Callable[[Program, random.Random], str]


def kill(program: Program, draw: random.Random) -> str:
    return _signal_rank(program, draw, signal.SIGKILL)


def kill_all(program: Program, draw: random.Random) -> str:
    for process in program.rank_processes():
        process.send_signal(signal.SIGKILL)
    return "all ranks"


def segfault(program: Program, draw: random.Random) -> str:
    return _signal_rank(program, draw, signal.SIGSEGV)


def freeze(program: Program, draw: random.Random) -> str:
    """Found by launch.progress_s: its heartbeat stops, and the others wait for it."""
    return _signal_rank(program, draw, signal.SIGSTOP)


def hang(program: Program, draw: random.Random) -> str:
    """A rank sleeps in its loss (job.py looks for the file). Found by launch.progress_s too."""
    victim = draw.randrange(program.ranks)
    program.trouble(f"hang{victim}").touch()
    return f"rank {victim}"


def error(program: Program, draw: random.Random) -> str:
    """A rank raises in its loss, with another text each time: two alike would end the run."""
    victim = draw.randrange(program.ranks)
    program.trouble(f"error{victim}").write_text(f"planted {draw.random()}")
    return f"rank {victim}"


def kill_loader(program: Program, draw: random.Random) -> str:
    victim = draw.randrange(program.ranks)
    loaders = program.rank_processes()[victim].children()
    if not loaders:
        raise SoakError(f"rank {victim} has no loader")
    loaders[0].send_signal(signal.SIGKILL)
    return f"a loader of rank {victim}"


def kill_in_save(program: Program, draw: random.Random) -> str:
    ranks, victim = program.rank_processes(), draw.randrange(program.ranks)
    wait_for_save(program)
    ranks[victim].send_signal(signal.SIGKILL)
    return f"rank {victim}"


def wait_for_save(program: Program) -> None:
    """Until a temporary folder appears: much closer together than other looks at the run."""
    root, deadline = program.checkpoints.root, time.monotonic() + SAVE_S
    while not any(path.name.startswith(TEMPORARY) for path in root.iterdir()):
        if time.monotonic() > deadline:
            raise SoakError(f"no save has begun within {SAVE_S:.0f} s")
        time.sleep(0.0005)


def preempt(program: Program, draw: random.Random) -> str:
    program.stop()
    program.resume()
    return "supervisor"


def preempt_rank(program: Program, draw: random.Random) -> str:
    victim = _signal_rank(program, draw, signal.SIGUSR2)
    program.wait_for_exit(PREEMPTED, STOP_S)
    program.resume()
    return victim


def kill_supervisor(program: Program, draw: random.Random) -> str:
    program.process.send_signal(signal.SIGKILL)
    program.wait_for_exit(KILLED, STOP_S)
    program.resume()
    return "supervisor"


def damage(program: Program, draw: random.Random) -> str:
    """Stop it, damage the newest checkpoint, resume: it must name that one and take another."""
    program.stop()
    newest = program.checkpoints.steps()[0]
    file = draw.choice(sorted(program.checkpoints.manifest(newest).files))
    how = draw.choice([truncate, flip_bit])
    how(program.checkpoints.path(newest) / file, draw)
    logs = [program.run.rank_log(rank) for rank in range(program.ranks)]
    before, attempt = [log.stat().st_size for log in logs], program.attempt
    program.resume()
    program.wait_for_next(attempt)
    told = "".join(log.read_text()[at:] for log, at in zip(logs, before, strict=True))
    if f"step_{newest}/{file}" not in told:
        raise SoakError(f"nobody was told that step_{newest}/{file} was damaged: {told}")
    if f"resumes from the checkpoint of step {newest}" in told or "resumes from" not in told:
        raise SoakError(f"the damaged step_{newest} was used, or no other one: {told}")
    return f"step_{newest}/{file}, {how.__name__}"


def truncate(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def flip_bit(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _signal_rank(program: Program, draw: random.Random, number: int) -> str:
    victim = draw.randrange(program.ranks)
    program.rank_processes()[victim].send_signal(number)
    return f"rank {victim}"


KINDS: dict[str, Strike] = {
    "kill": kill,
    "kill_all": kill_all,
    "segfault": segfault,
    "freeze": freeze,
    "hang": hang,
    "error": error,
    "kill_loader": kill_loader,
    "kill_in_save": kill_in_save,
    "preempt": preempt,
    "preempt_rank": preempt_rank,
    "kill_supervisor": kill_supervisor,
    "damage": damage,
}


@dataclass(frozen=True)
class Struck:
    """One fault as it was; `back_s` is from the fault to the first step after it."""

    at_s: float
    kind: str
    victim: str
    step: int
    back_s: float


@dataclass
class Storm:
    """Faults `every` seconds on average, for `seconds` from the first step on. Afterwards it knows
    how long it really was, and which step the run had reached when it was over."""

    kinds: Sequence[str]
    every: float
    seconds: float
    seed: int
    lasted_s: float = 0.0
    last_step: int = 0

    def strike(self, program: Program) -> Iterator[Struck]:
        draw, deck = random.Random(self.seed), []
        program.wait_until(lambda: program.is_stepping, "the first step", START_S)
        began_at, due_at = time.monotonic(), 0.0
        while (due_at := due_at + self.every * draw.uniform(0.75, 1.25)) < self.seconds:
            self._wait(program, began_at + due_at)
            # Every kind once before any comes again: a short soak sees as many as it can.
            deck = deck or draw.sample(list(self.kinds), len(self.kinds))
            yield self._strike_once(program, deck.pop(), began_at, random.Random(draw.random()))
            due_at = max(due_at, time.monotonic() - began_at - self.every / 2)
        self._wait(program, began_at + self.seconds)
        self.lasted_s, self.last_step = time.monotonic() - began_at, program.step

    def _wait(self, program: Program, until: float) -> None:
        program.wait_until(lambda: time.monotonic() > until, "the faults were over", self.seconds)

    def _strike_once(
        self, program: Program, kind: str, began_at: float, draw: random.Random
    ) -> Struck:
        step, attempt, struck_at = program.step, program.attempt, time.monotonic()
        victim = KINDS[kind](program, draw)
        program.wait_for_next(attempt)
        back_s = time.monotonic() - struck_at
        program.wait_until(lambda: program.step > step + PAST, f"past {kind}", START_S)
        return Struck(struck_at - began_at, kind, victim, step, back_s)
