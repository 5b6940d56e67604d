"""Optional observers of a rank's steps: profiles, memory dumps, ranges for nsys."""

import torch

from paceline.config.schema import ObserveConfig
from paceline.records import RankError
from paceline.records.profiled import parse_profile
from paceline.records.rundir import RunDir
from paceline.strategies.base import Engine
from paceline.strategies.clock import Clock
from paceline.train.memory import MemoryDumps, let_go
from paceline.train.profiling import Profiler
from paceline.train.ranges import mark_by_nvtx


class Observers:
    """The loop calls `begin` and `end` around each step. What nobody asked for costs nothing."""

    def __init__(
        self, asked: ObserveConfig, run: RunDir, rank: int, clock: Clock, device: torch.device
    ) -> None:
        self._clock, self._device, self._nvtx = clock, device, asked.nvtx
        steps = parse_profile(asked.profile)
        self.profiler = Profiler(run, rank, clock, device, steps, asked.profile_detail)
        self.memory = MemoryDumps(run, rank, device, asked.memory, asked.memory_every)
        self.requests, self.notes = self.profiler.requests, self.profiler.notes

    def watch(self, engine: Engine, first_step: int) -> None:
        """Begin: the model stands, and no step was taken yet."""
        self.memory.watch(engine, first_step)
        if self._nvtx and self._device.type == "cuda":
            mark_by_nvtx(engine.module, self._clock)

    def begin(self, step: int, is_free: bool) -> None:
        self.profiler.begin(step, is_free)

    def end(self, step: int) -> None:
        self.profiler.end(step)
        self.memory.end(step)

    def close(self) -> None:
        self.profiler.close()

    def explain_memory(self, error: BaseException, told: RankError) -> RankError:
        """Write down what holds the memory that has run out, say it with the error, and let it
        go."""
        try:
            dump = self.memory.dump("oom", self._clock.step, error)
        except (RuntimeError, MemoryError):  # not even for that is there memory
            return told
        finally:
            let_go(error)
        first, hint, rest = told.message.partition("\nhint: ")
        return told.model_copy(update={"message": f"{first}\n{dump.sentence()}{hint}{rest}"})
