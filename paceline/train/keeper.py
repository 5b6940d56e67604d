"""Decides after each step, on all ranks together: is a checkpoint due, is it time to stop?

Any rank may be asked to stop by a signal, rank 0 also by files and by its clock. All ranks act on
the largest wish of any of them, at the same step.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from paceline.checkpoint.saver import Saver
from paceline.config.schema import CheckpointConfig
from paceline.config.training import TrainConfig
from paceline.data.rng import capture_rng
from paceline.errors import ConfigError, Outcome
from paceline.metrics import Goal
from paceline.records import BestMetric, Kept
from paceline.strategies.base import Engine
from paceline.train.control import Ask, Requests
from paceline.train.hooks import Hook
from paceline.train.readback import Readback

STOPS = {Ask.PREEMPT: Outcome.PREEMPTED, Ask.INTERRUPT: Outcome.INTERRUPTED}


class Consensus:
    """Lets every rank know what any rank was asked. On a GPU the answer is one look late, so that
    no host waits for its device."""

    def __init__(self, requests: Requests, device: torch.device) -> None:
        self.requests, self.device = requests, device
        self.lateness = 1 if device.type == "cuda" else 0
        self._words = [torch.tensor(int(ask), device=device) for ask in Ask]
        self._readback, self._looks = Readback(device), 0

    def look(self) -> Ask:
        """Return the largest request of any rank. A collective of one number: all ranks look
        equally often."""
        if dist.get_world_size() == 1:
            return self.requests.asked
        word = self._words[self.requests.asked].clone()
        dist.all_reduce(word, dist.ReduceOp.MAX)
        self._readback.push(self._looks, [word])
        # A CPU reads its own look; a GPU that of the step before, which it has passed by now.
        heard = self._readback.pop(self._looks - self.lateness, wait=True)
        self._looks += 1
        return Ask(int(heard[-1][1][0])) if heard else Ask.NOTHING


class Wish(NamedTuple):
    """`reason` for a checkpoint, empty for none; `stop` is how the run then ends."""

    reason: str
    stop: Outcome | None


class Best:
    """The best evaluation so far by `train.best`, and how many have followed without improving on
    it. It is the same on every rank."""

    def __init__(self, config: TrainConfig, found: BestMetric | None = None, num_worse: int = 0):
        self.is_auto, self.patience = config.best == "auto", config.stop_after
        self.goal = Goal.of_best(config.best)
        is_same = found is not None and found.name == self.goal.name  # else it was changed
        self.found, self.num_worse = (found, num_worse) if is_same else (None, 0)

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        self.require_known(metrics)
        value = metrics.get(self.goal.name)
        if value is None:
            return
        # A value that is not a number is never the best, and no improvement.
        if math.isfinite(value) and (
            self.found is None or self.goal.beats(value, self.found.value)
        ):
            self.found, self.num_worse = BestMetric(step=step, name=self.goal.name, value=value), 0
        else:
            self.num_worse += 1

    def require_known(self, names: Collection[str]) -> None:
        """Refuse evaluations without the metric that decides something."""
        is_wanted = not self.is_auto or self.patience != "off"
        if is_wanted and self.goal.name not in names:
            raise self._unknown(names)

    @property
    def why_over(self) -> str:
        """Say why training ends here by `train.stop_after`; empty where it does not."""
        if self.patience == "off" or self.num_worse < self.patience:
            return ""
        best = f"the best is {self.found}" if self.found else "none of them was a number"
        times = f"{self.num_worse} evaluation{'s' if self.num_worse > 1 else ''}"
        return f"{self.goal.name} has not improved in {times}: {best} (train.stop_after)"

    def _unknown(self, names: Collection[str]) -> ConfigError:
        asked = "train.stop_after needs a metric to watch, and" if self.is_auto else "train.best:"
        return ConfigError(
            f"{asked} there is no {self.goal.name} in this job's evaluation\n"
            f"hint: set train.best to one of {', '.join(sorted(names)) or 'none'}, with :min or"
            " :max"
        )


@dataclass(frozen=True)
class KeeperParts:
    """`describe` returns what state.json says about a step; `hooks` are called after each
    checkpoint that is complete."""

    config: CheckpointConfig
    engine: Engine
    saver: Saver
    requests: Requests
    device: torch.device
    num_steps: int
    describe: Callable[[int, str, int], Kept]
    hooks: tuple[Hook, ...] = ()


class Keeper:
    """Decides after each step, together with all ranks, whether to save and whether to stop."""

    def __init__(self, parts: KeeperParts, best: Best) -> None:
        self.parts, self.best = parts, best
        self.consensus = Consensus(parts.requests, parts.device)
        self.must_write, self.at_stop = parts.config.on_error == "stop", parts.config.at_stop
        self.evaluation_is_due = self._has_reserved = False
        self._saved_step, self._saved_at = 0, time.monotonic()

    def is_stopping(self) -> bool:
        """Say whether to stop: asked between the batches of an evaluation, and before the first
        step."""
        return self.consensus.look() in STOPS

    def note_evaluation(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Remember the best. None: the evaluation was cut short, and is due again on resuming."""
        self.evaluation_is_due = metrics is None
        if metrics is not None:
            self.best.note(step, metrics)

    def wish(self, step: int, is_over: bool = False) -> Wish:
        """Return what all ranks do after this step; `is_over`: there is no data for another one."""
        self._reserve()
        self._tell()
        # Each rank raises what it was asked, `look` gives all of them the largest. All that follows
        # depends on that answer, on the step and on what every rank has alike, so all ranks decide
        # the same without another collective.
        self._raise_own()
        ask = self.consensus.look()
        if ask is Ask.FAIL:
            self._require_written()  # raises on every rank: the saver told all of the failure
        stop = STOPS.get(ask)
        if stop is not None:
            # A preempted job has seconds: spend them on this save, not on reading old ones back.
            self.parts.saver.hurry()
        elif is_over or self.best.why_over:
            stop = Outcome.OK
        # On a GPU an answer is one step old. So the step after a checkpoint still hears the request
        # that this checkpoint has answered, and must not save again for it.
        is_stale = 0 < step - self._saved_step <= self.consensus.lateness
        if ask is Ask.CHECKPOINT and is_stale and stop is None:
            return Wish("", None)
        # A step is saved once, and step 0 (a stop before the first step) never.
        reason = self._reason(step, ask, stop) if step != self._saved_step else ""
        self.parts.requests.answered(ask)
        return Wish(reason, stop)

    def _reserve(self) -> None:
        """Reserve memory for the saves that will be due: after the first step, when the optimizer
        has its state."""
        if self._has_reserved or self.parts.device.type != "cuda" or not self._keeps_best:
            return
        self._has_reserved = True
        if self.parts.config.mode == "async":
            self.parts.saver.reserve(self.parts.engine.pieces())

    def _raise_own(self) -> None:
        """Raise this rank's own requests to the others."""
        requests = self.parts.requests
        if self.must_write and self.parts.saver.failure is not None:
            requests.raise_to(Ask.FAIL)
        if dist.get_rank() == 0 and self._is_time():
            requests.raise_to(Ask.CHECKPOINT)

    @property
    def _keeps_best(self) -> bool:
        """Say whether the best evaluation gets a checkpoint: if there are checkpoints on the way,
        or if the last one is kept and a metric was named, or stops the run, so that the last is not
        what is wanted."""
        config = self.parts.config
        is_named = not self.best.is_auto or self.best.patience != "off"
        return config.every != "off" or config.every_s != "off" or (config.at_end and is_named)

    def _is_time(self) -> bool:
        """Say whether `every_s` has passed. Only rank 0's clock decides, through `look`."""
        every_s = self.parts.config.every_s
        return every_s != "off" and time.monotonic() - self._saved_at >= every_s

    def _reason(self, step: int, ask: Ask, stop: Outcome | None) -> str:
        """Return why a checkpoint is due after this step, or "". All ranks find the same."""
        config = self.parts.config
        if stop is not None and stop.is_stop:
            return str(stop) if self.at_stop else ""
        if ask is Ask.CHECKPOINT:
            return "every_s" if self._is_time() else "request"
        if config.every != "off" and step % config.every == 0:
            return "every"
        found = self.best.found
        if self._keeps_best and found is not None and found.step == step:
            return "best"
        is_last = stop is not None or step == self.parts.num_steps
        return "end" if is_last and config.at_end else ""

    def save(self, step: int, reason: str, num_skips: int) -> None:
        """Write a checkpoint of the state as it is now; in the background if so configured."""
        parts, called_at = self.parts, time.perf_counter()
        self._require_written()  # of the one before, on every rank alike
        self._tell()
        told = parts.describe(step, reason, num_skips)
        kept = told.model_copy(
            update={
                "best": self.best.found,
                "num_worse": self.best.num_worse,
                "evaluation_is_due": self.evaluation_is_due,
            }
        )
        parts.saver.save(kept, parts.engine.pieces(), capture_rng(parts.device), called_at)
        self._saved_step, self._saved_at = step, time.monotonic()
        if parts.config.mode == "sync":
            self._require_written()

    def close(self) -> None:
        """Wait for what is being written; all ranks learn together if it failed."""
        self.parts.saver.close()
        self._require_written()
        self._tell()

    def _tell(self) -> None:
        """Call the job's hooks for a checkpoint that is complete: here, not in the thread that
        wrote it."""
        if self.parts.hooks and (step := self.parts.saver.take_news()) is not None:
            for hook in self.parts.hooks:
                hook(step, self.parts.saver.writer.folder.path(step))

    def _require_written(self) -> None:
        self.parts.saver.wait()
        failure = self.parts.saver.failure
        if self.must_write and failure is not None:
            raise failure
