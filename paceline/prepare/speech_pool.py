"""Runs work over many files in forked processes; if one dies, only its current file is lost.

    for number, found in each_in_parallel(groups, work, num_workers): ...

`work` is called in a process with some numbers and yields one answer for each, in their order. The
processes are forked, so `work` and all that it reads are there already: only numbers go to them.
"""

import ctypes
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from paceline.machine.process import die_with_parent

AHEAD = 32  # numbers that a process may still owe when it is given more
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MAPPED_BYTES, KEPT_BYTES = 32 << 20, 256 << 20  # the most that glibc takes; of each process
Group = Sequence[int]
Work = Callable[[Group], Iterator[Any]]


class Died(NamedTuple):
    """The answer for a number whose process has died over it."""

    how: str


class Raised(NamedTuple):
    """An error in `work` that is no answer: it ends everything."""

    error: Exception
    trace: str


class Worker:
    """One process, and the numbers that it owes."""

    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context("fork")
        self.end, theirs = context.Pipe()
        self.owed: deque[int] = deque()
        self.process = context.Process(target=_serve, args=(work, theirs, self.end), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, group: Group) -> None:
        self.owed.extend(group)
        try:
            self.end.send(list(group))
        except OSError:  # it has died: the next read says so
            pass

    def close(self) -> None:
        self.end.close()
        self.process.kill()
        self.process.join()


def each_in_parallel(
    groups: Sequence[Group], work: Work, num_workers: int
) -> Iterator[tuple[int, Any]]:
    """Yield each number with its answer, in no fixed order. A number whose process dies over it has
    `Died` for an answer."""
    waiting = deque(groups)
    workers = [Worker(work) for _ in range(min(num_workers, len(groups)))]
    try:
        while waiting or any(worker.owed for worker in workers):
            for worker in workers:
                while waiting and len(worker.owed) < AHEAD:
                    worker.give(waiting.popleft())
            busy = {worker.end: worker for worker in workers if worker.owed}
            for end in wait(list(busy)):
                worker = busy[end]  # type: ignore[index]
                try:
                    answer = worker.end.recv()
                except (EOFError, ConnectionError):
                    workers.remove(worker)
                    yield worker.owed.popleft(), _bury(worker)
                    if worker.owed:
                        waiting.appendleft(tuple(worker.owed))
                    workers.append(Worker(work))
                    continue
                if isinstance(answer, Raised):
                    answer.error.add_note(answer.trace)
                    raise answer.error
                yield worker.owed.popleft(), answer
    finally:
        for worker in workers:
            worker.close()


def _bury(worker: Worker) -> Died:
    worker.end.close()
    worker.process.join()
    code = worker.process.exitcode or 0
    return Died(signal.Signals(-code).name if code < 0 else f"exit code {code}")


def _serve(work: Work, end: Connection, parents: Connection) -> None:
    parents.close()
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # its parent decides when it ends
        signal.signal(number, signal.SIG_IGN)
    _keep_freed_memory()
    # Decoders write to stderr what they think of a file; the answer says it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        while True:
            try:
                group = end.recv()
            except EOFError:
                return
            for answer in work(group):
                end.send(answer)
    except BrokenPipeError:
        return
    except Exception as error:
        end.send(Raised(error, traceback.format_exc()))


def _keep_freed_memory() -> None:
    """Have glibc keep what is freed for the next file. It would give arrays of this size back to
    the kernel, which zeroes every page of them again: a fifth of all time was that."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
