"""After each step, together with all other ranks: is a checkpoint due, is it time to stop?

Any rank may be asked to stop by a signal, rank 0 also by files and by its clock. All ranks act on
the largest wish of any of them, at the same step.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from paceline.checkpoint.saver import Saver
from paceline.config.schema import CheckpointConfig
from paceline.data.rng import capture_rng
from paceline.errors import Outcome
from paceline.records import BestMetric, Kept
from paceline.strategies.base import Engine
from paceline.train.control import Ask, Requests
from paceline.train.readback import Readback

STOPS = {Ask.PREEMPT: Outcome.PREEMPTED, Ask.INTERRUPT: Outcome.INTERRUPTED}


class Consensus:
    """Tells every rank what any rank was asked. On a GPU the answer is that of the look before, so
    that no host waits for its device."""

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


@dataclass(frozen=True)
class KeeperParts:
    """`describe` says of a step all that is kept of it beside tensors."""

    config: CheckpointConfig
    engine: Engine
    saver: Saver
    requests: Requests
    device: torch.device
    num_steps: int
    describe: Callable[[int, str, int], Kept]


class Keeper:
    """Decides after each step, together with all ranks, whether to save and whether to stop."""

    def __init__(self, parts: KeeperParts, best: BestMetric | None = None) -> None:
        self.parts, self.best = parts, best
        self.consensus = Consensus(parts.requests, parts.device)
        self.must_write, self.at_stop = parts.config.on_error == "stop", parts.config.at_stop
        self.evaluation_is_due = self._has_reserved = False
        self._saved_step, self._saved_at = 0, time.monotonic()

    def is_stopping(self) -> bool:
        """Say whether to stop: asked between the batches of an evaluation, and before the first
        step."""
        return self.consensus.look() in STOPS

    def note_evaluation(self, step: int, loss: float | None) -> None:
        """Remember the best loss. None: the evaluation was cut short, and is due again on
        resuming."""
        self.evaluation_is_due = loss is None
        if loss is None or not math.isfinite(loss):
            return
        if self.best is None or loss < self.best.val_loss:
            self.best = BestMetric(step=step, val_loss=loss)

    def wish(self, step: int) -> Wish:
        """Return what all ranks do after this step."""
        self._reserve()
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
        # On a GPU an answer is one step old. So the step after a checkpoint still hears the request
        # that this checkpoint has answered, and must not save again for it.
        if ask is Ask.CHECKPOINT and 0 < step - self._saved_step <= self.consensus.lateness:
            return Wish("", None)
        # A step is saved once, and step 0 (a stop before the first step) never.
        reason = self._reason(step, ask, stop) if step != self._saved_step else ""
        self.parts.requests.answered(ask)
        return Wish(reason, stop)

    def _reserve(self) -> None:
        """Reserve memory for the saves that will be due: after the first step, when the optimizer
        has its state."""
        if self._has_reserved or self.parts.device.type != "cuda" or not self._keeps_any:
            return
        self._has_reserved = True
        if self.parts.config.mode == "async":
            self.parts.saver.reserve(self.parts.engine.pieces())

    def _raise_own(self) -> None:
        """Raise what this rank itself has to ask of the others."""
        requests = self.parts.requests
        if self.must_write and self.parts.saver.failure is not None:
            requests.raise_to(Ask.FAIL)
        if dist.get_rank() == 0 and self._is_time():
            requests.raise_to(Ask.CHECKPOINT)

    @property
    def _keeps_any(self) -> bool:
        return self.parts.config.every != "off" or self.parts.config.every_s != "off"

    def _is_time(self) -> bool:
        """Say whether `every_s` has passed. Only rank 0's clock decides; its word goes through
        `look`."""
        every_s = self.parts.config.every_s
        return every_s != "off" and time.monotonic() - self._saved_at >= every_s

    def _reason(self, step: int, ask: Ask, stop: Outcome | None) -> str:
        """Return why a checkpoint is due after this step, or "". All ranks find the same."""
        config = self.parts.config
        if stop is not None:
            return str(stop) if self.at_stop else ""
        if ask is Ask.CHECKPOINT:
            return "every_s" if self._is_time() else "request"
        if config.every != "off" and step % config.every == 0:
            return "every"
        if self._keeps_any and self.best is not None and self.best.step == step:
            return "best"
        return "end" if step == self.parts.num_steps and config.at_end else ""

    def save(self, step: int, reason: str, num_skips: int) -> None:
        """Write a checkpoint of the state as it is now; in the background if so configured."""
        parts, called_at = self.parts, time.perf_counter()
        self._require_written()  # of the one before, on every rank alike
        told = parts.describe(step, reason, num_skips)
        kept = told.model_copy(
            update={"best": self.best, "evaluation_is_due": self.evaluation_is_due}
        )
        parts.saver.save(kept, parts.engine.pieces(), capture_rng(parts.device), called_at)
        self._saved_step, self._saved_at = step, time.monotonic()
        if parts.config.mode == "sync":
            self._require_written()

    def close(self) -> None:
        """Wait for what is being written; all ranks learn together if it failed."""
        self.parts.saver.close()
        self._require_written()

    def _require_written(self) -> None:
        self.parts.saver.wait()
        failure = self.parts.saver.failure
        if self.must_write and failure is not None:
            raise failure
