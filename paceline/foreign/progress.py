"""How other trainers log a step: one pattern for each, mapped to our columns.

HF Trainer   {'loss': 2.31, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.1}
Lightning    Epoch 1:  50%|##   | 50/100 [00:05<00:05, 9.80it/s, v_num=0, train_loss=0.123]
DeepSpeed    [Rank 0] step=10, skipped=0, lr=[0.0001], mom=[[0.9, 0.999]]
             [Rank 0] time (ms) | fwd_microstep: 12.3 | bwd_microstep: 24.1 | step_microstep: 3.0
             ... global_step=10, RunningAvgSamplesPerSec=31.2, CurrSamplesPerSec=30.9, ...
any          step 120 | loss 3.2110 | lr 2.00e-04 | toks/s 9210      Step 120: Loss 3.2110
ours         TimingRank step=50 rank=1 loss=3.2110 data_wait=0.41 ... iter=190.02
"""

import ast
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from paceline.foreign.failures import known_rank

NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
MOMENT = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)")
BAR = re.compile(r"(\d+)/(\d+) \[[\d:?]+<[\d:?, ]*(?:,\s*)?(?:(" + NUMBER + r")(it/s|s/it))?")
RATE = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|" + NUMBER  # people like 52,341
BARE = re.compile(r"(?<=: )-?(?:nan|inf)(?=[,}])")  # as Python prints them in a dict
HF = re.compile(r"\{['\"](?:loss|eval_loss|eval_runtime|train_runtime|train_loss)['\"].*\}")
LIGHTNING = re.compile(
    r"Epoch (\d+)(?::\s+\d+%\|.*?\||/\d+\s+\S+) (\d+)/(\d+) \[?[\d:]+\s*[<•]\s*[\d:?]+,?\s*(.*)"
)
DEEPSPEED_STEP = re.compile(r"\bstep=(\d+), skipped=(\d+), lr=\[([^\],]+)")
DEEPSPEED_SPEED = re.compile(r"global_step=(\d+), .*?CurrSamplesPerSec=(" + NUMBER + ")")
DEEPSPEED_TIME = re.compile(r"(?:\[Rank (\d+)\].*?|rank=(\d+) )time \(ms\) \| (.*)")
TIMING = re.compile(r"TimingRank step=(\d+) rank=(\d+) loss=\S+ (.*)")
PLAIN_STEP = re.compile(r"\b(?:step|iter(?:ation)?)\b[ =:#]*(\d+)(?:/(\d+))?", re.IGNORECASE)
PLAIN_VALUES = {
    "loss": re.compile(r"(?<![\w/])(?:train[_ ])?loss[ =:]+(" + NUMBER + ")", re.IGNORECASE),
    "lr": re.compile(r"(?<!\w)(?:lr|learning[_ ]rate)[ =:]+(" + NUMBER + ")", re.IGNORECASE),
    "grad_norm": re.compile(r"(?:grad[_ ]?norm|gnorm)[ =:]+(" + NUMBER + ")", re.IGNORECASE),
    "tokens_per_s": re.compile(r"(?:toks?|tokens?)/s(?:ec)?[ =:]+(" + RATE + ")", re.IGNORECASE),
    "samples_per_s": re.compile(r"samples/s(?:ec)?[ =:]+(" + RATE + ")", re.IGNORECASE),
    "val_loss": re.compile(
        r"(?:val(?:idation)?|eval)[_ ]loss[ =:]+(" + NUMBER + ")", re.IGNORECASE
    ),
}
HF_NAMES = {
    "loss": "loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "eval_loss": "val_loss",
}
LIGHTNING_NAMES = {"train_loss": "loss", "train_loss_step": "loss", "loss": "loss",
                   "val_loss": "val_loss"}  # fmt: skip
TIMES = {"fwd": "forward_s", "bwd": "backward_s", "step": "optimizer_s", "data_wait": "data_s",
         "fwd_microstep": "forward_s", "bwd_microstep": "backward_s",
         "step_microstep": "optimizer_s", "iter": "wall_s"}  # fmt: skip
Row = dict[str, float]
# Beyond these a number in a log is no step, no loss and no time; our own tables would refuse it.
MAX_STEP, MAX_VALUE, MAX_TIME_S = 10**15, 1e50, 1e9


@dataclass
class Progress:
    """What the lines of all logs have told so far: rows by step, phases by rank and step."""

    rows: dict[int, Row] = field(default_factory=dict)
    phases: dict[int, dict[int, Row]] = field(default_factory=dict)  # seconds
    step: int = 0  # of the log that is read
    last_step: int = 0
    num_steps: int = 0
    trainers: dict[str, int] = field(default_factory=dict)  # lines of each
    told: list[Row] = field(default_factory=list)  # of HF's Trainer, whose step is not known yet
    times: dict[int, float] = field(default_factory=dict)  # when a step was first written of

    def note(self, trainer: str, step: int, values: Row) -> None:
        self.trainers[trainer] = self.trainers.get(trainer, 0) + 1
        if step > MAX_STEP:
            return
        values = {k: v for k, v in values.items() if not MAX_VALUE < abs(v) < math.inf}
        if step > 0 and values:
            self.rows.setdefault(step, {}).update(values)
        self.step = max(self.step, step)
        self.last_step = max(self.last_step, self.step)

    def note_times(self, rank: int, step: int, times: Row) -> None:
        times = {name: seconds for name, seconds in times.items() if 0 <= seconds < MAX_TIME_S}
        if 0 < step <= MAX_STEP and times and known_rank(rank) is not None:
            self.phases.setdefault(rank, {}).setdefault(step, {}).update(times)

    def read(self, line: str, rank: int | None) -> None:
        """Take in a line; the first pattern that fits it counts."""
        before = self.step
        for reader in READERS:
            if reader(self, line, rank or 0):
                break
        if self.step > before and (moment := MOMENT.search(line)):
            at = datetime.fromisoformat(moment[1].replace(",", "."))
            self.times.setdefault(self.step, at.timestamp())

    def settle(self) -> None:
        """Give what HF's Trainer has told the step of the bar below it."""
        for values in self.told:
            self.note("hf trainer", self.step, values)
        self.told.clear()

    def begin_log(self) -> None:
        """Count anew: lines without a step belong to the last one that their own log has named."""
        self._settle_rest()
        self.step = self.num_steps = 0

    def finish(self) -> None:
        self._settle_rest()
        self._fill_step_times()

    def _settle_rest(self) -> None:
        """Without any bar, what was told is counted: the steps themselves are not in the log."""
        if self.step == 0:
            for number, values in enumerate(self.told, start=1):
                self.note("hf trainer", number, values)
            self.told.clear()
        self.settle()

    def _fill_step_times(self) -> None:
        """Give each step that has no time of its own the mean since the one written of before it,
        where lines have times."""
        for (a, before), (b, after) in pairwise(sorted(self.times.items())):
            row = self.rows.get(b, {})
            if "step_s" not in row and after > before:
                self.rows.setdefault(b, row)["step_s"] = (after - before) / (b - a)


def _read_hf(found: Progress, line: str, rank: int) -> bool:
    match = HF.search(line)
    if match is None:
        return False
    try:
        told = ast.literal_eval(BARE.sub(r"'\g<0>'", match[0]))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    if isinstance(told, dict):
        values = {HF_NAMES[k]: v for k, raw in told.items() if k in HF_NAMES
                  and (v := _number(raw)) is not None}  # fmt: skip
        found.note("hf trainer", 0, {})
        found.told += [values] if values else []
    return isinstance(told, dict)


def _read_lightning(found: Progress, line: str, rank: int) -> bool:
    match = LIGHTNING.search(line)
    if match is None:
        return False
    epoch, batch, per_epoch = int(match[1]), int(match[2]), int(match[3])
    values: Row = {}
    for name, text in re.findall(f"(\\w+)(?:=|: )({NUMBER})", match[4]):
        if name in LIGHTNING_NAMES:
            values[LIGHTNING_NAMES[name]] = float(text)
    if (speed := re.search(f"({NUMBER})it/s", match[4])) and float(speed[1]) > 0:
        values["step_s"] = 1 / float(speed[1])
    found.note("lightning", epoch * per_epoch + batch, values)
    return True


def _read_bar(found: Progress, line: str, rank: int) -> bool:
    """Read a progress bar. HF's Trainer writes a dict, and then the bar again: that one has the
    step which the dict is about. Bars of evaluations are shorter."""
    for match in BAR.finditer(line):
        if int(match[2]) < found.num_steps:
            continue
        if int(match[1]) > MAX_STEP:
            continue
        found.step, found.num_steps = max(found.step, int(match[1])), int(match[2])
        found.last_step = max(found.last_step, found.step)
        found.settle()
    return False  # the same line may hold a dict


def _read_deepspeed(found: Progress, line: str, rank: int) -> bool:
    if match := DEEPSPEED_STEP.search(line):
        lr = _number(match[3])
        found.note("deepspeed", int(match[1]), {} if lr is None else {"lr": lr})
    elif match := DEEPSPEED_SPEED.search(line):
        found.note("deepspeed", int(match[1]), {"samples_per_s": float(match[2])})
    elif match := DEEPSPEED_TIME.search(line):
        owner = int(match[1] or match[2] or rank)
        found.trainers["deepspeed"] = found.trainers.get("deepspeed", 0) + 1
        found.note_times(owner, found.step, _times(re.split(r"\s*\|\s*", match[3]), ":"))
    return match is not None


def _read_timing(found: Progress, line: str, rank: int) -> bool:
    match = TIMING.search(line)
    if match is not None:
        found.note_times(int(match[2]), int(match[1]), _times(match[3].split(), "="))
    return match is not None


def _times(parts: list[str], sign: str) -> Row:
    """Return seconds by column; parts of one phase add up. They are written in milliseconds."""
    times: Row = {}
    for part in parts:
        name, _, text = part.partition(sign)
        value = _number(text)
        if name.strip() in TIMES and value is not None:
            column = TIMES[name.strip()]
            times[column] = times.get(column, 0.0) + value / 1000
    return times


def _read_plain(found: Progress, line: str, rank: int) -> bool:
    step = PLAIN_STEP.search(line)
    values = {
        name: float(match[1].replace(",", "")) for name, pattern in PLAIN_VALUES.items()
        if (match := pattern.search(line))
    }  # fmt: skip
    if step is None or not values or rank > 0:
        return False
    if step[2]:
        found.num_steps = int(step[2])
    if "val_loss" in values and values.get("loss") == values["val_loss"]:
        del values["loss"]
    found.note("unknown", int(step[1]), values)
    return True


def _number(raw: object) -> float | None:
    try:
        return float(raw)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


READERS: tuple[Callable[[Progress, str, int], bool], ...] = (
    _read_bar, _read_hf, _read_lightning, _read_deepspeed, _read_timing, _read_plain,
)  # fmt: skip
