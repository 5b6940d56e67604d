"""What a person sees on stderr: progress, problems, how a run ended. Readable without colour."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from paceline.cli.bar import Bar
from paceline.errors import Outcome, PacelineError
from paceline.metrics import TRAIN, VAL
from paceline.records import Audit, Plan, Result, words
from paceline.records.findings import Findings, RunFinding
from paceline.records.rundir import RunDir
from paceline.records.words import count, duration, elapsed, number, typed, visible
from paceline.workloads.given import resuming

PLAIN_INTERVAL_S = 5.0
TAIL_LINES = 12
MAX_SAMPLE_IDS = 8


class ConsoleTalk:
    """Show progress on a terminal; a line every few seconds where stderr is a file or a pipe."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(
            stderr=True, highlight=False, soft_wrap=True, emoji=False, quiet=quiet
        )
        self._bar: Bar | None = None
        self._last_line_at = 0.0

    def say(self, text: str) -> None:
        self.console.print(literal(text))

    def training(self, run: RunDir, plan: Plan) -> Callable[[dict[str, str]], None]:
        ranks = count(plan.world_size, "rank")
        self.say(
            f"training {plan.name} for {plan.length} on {ranks} ({plan.device.value},"
            f" {plan.strategy.value}, {plan.precision.value}) in {typed(run.root)}"
        )
        if not self.console.is_terminal:
            return lambda row: self._plain_row(row, plan)
        self._bar = Bar(self.console, run, plan)
        self._bar.start()
        return self._bar.update

    def trained(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _plain_row(self, row: dict[str, str], plan: Plan) -> None:
        now = time.monotonic()
        is_due = now - self._last_line_at >= PLAIN_INTERVAL_S
        is_evaluated = any(value for name, value in row.items() if name.startswith("val"))
        if is_due or is_evaluated or int(row["step"]) == plan.steps:
            self._last_line_at = now
            left_s = (plan.steps - int(row["step"])) * float(row["step_s"])
            # The first steps are slow and say nothing of the rest.
            is_known = row["warmup"] == "0" and left_s >= 1
            left = f"  about {elapsed(left_s)} left" if is_known else ""
            self.say(f"step {row['step']}/{plan.steps}  {_describe(row, plan)}{left}")


def _describe(row: dict[str, str], plan: Plan) -> str:
    rate = row["tokens_per_s"] or row["samples_per_s"]
    unit = "tokens/s" if row["tokens_per_s"] else "samples/s"
    val = f"  validation {number(float(row['val_loss']))}" if row["val_loss"] else ""
    metrics = {name: value for name, value in row.items() if name.startswith((TRAIN, VAL))}
    more = "".join(f"  {name} {number(float(v))}" for name, v in metrics.items() if v)
    step = duration(float(row["step_s"]), digits=4)
    epoch = ""
    if plan.epochs is not None:
        epoch = f"epoch {int(row['step']) / plan.steps * plan.epochs:.2f}/{plan.epochs:g}  "
    losses = f"{epoch}loss {number(float(row['loss']))}{val}{more}"
    return f"{losses}  {step}/step  {number(float(rate))} {unit}"


def print_problems(error: PacelineError) -> None:
    """Print every problem, its hint below it, nothing cut."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    for problem in error.problems:
        console.print(f"[bold red]error:[/] {literal(problem)}")


@contextmanager
def refusals_on_stdout(as_json: bool) -> Iterator[None]:
    """Print a refusal as data where --json was given: outcome, exit code and every problem."""
    try:
        yield
    except PacelineError as error:
        if as_json:
            body = {
                "outcome": error.outcome,
                "exit_code": error.exit_code,
                "problems": error.problems,
            }
            print_json(json.dumps(body, indent=2))
        raise


def say_result(talk: ConsoleTalk, result: Result, run: RunDir) -> None:
    """Say how a run ended, its figures with their window, and where its report is."""
    if result.outcome is Outcome.OK:
        loss = words.shown(result.final_loss)
        talk.say(f"finished {result.steps} steps, loss {loss}{_val(result)}")
        if result.why_early:
            talk.say(f"ended early: {result.why_early}")
        if result.padding is not None:
            talk.say(f"padding: {result.padding:.1%} of what was computed")
        if result.metrics:
            last = ", ".join(f"{name} {number(v)}" for name, v in result.metrics.items())
            talk.say(f"last metrics: {last}" + (f"; best {result.best}" if result.best else ""))
    elif result.outcome.is_stop:
        said = f"{result.outcome} after step {result.steps} (exit {result.exit_code})"
        talk.say(f"{said}{_way_on(result, run)}")
    else:
        say_failure(talk, result)
    for note in result.notes:
        talk.say(f"note: {note}")
    for line in _branches(run):
        talk.say(line)
    for finding in _warnings(run):
        talk.say(str(finding))
    if result.window and result.step_s:
        rate, unit = result.tokens_per_s or result.samples_per_s, "samples/s"
        unit = "tokens/s" if result.tokens_per_s else unit
        talk.say(
            f"{number(rate or 0.0)} {unit}, step p50 {duration(result.step_s.p50, digits=4)}"
            f" ({result.window})"
        )
    if run.report.is_file():
        talk.say(f"report: {typed(run.report)}")


def _branches(run: RunDir) -> Iterator[str]:
    """Yield what each branch of sparse attention really ran as, where the run has such."""
    proofs = Audit.load(run.audit).proofs if run.audit.is_file() else []
    for proof in proofs:
        if proof.what.startswith("attention: "):
            yield f"{proof.what}: {proof.effective}"


def _warnings(run: RunDir) -> list[RunFinding]:
    """Return what was judged of a run that a person should act on; how it ended has been said."""
    try:
        found = Findings.load(run.findings).findings
    except PacelineError:
        return []
    return [finding for finding in found if finding.severity == "warning"]


def _way_on(result: Result, run: RunDir) -> str:
    """Say how to resume a run that was stopped, where it has a checkpoint."""
    has_any = result.checkpoints is not None and result.checkpoints.num_written > 0
    if result.outcome is not Outcome.PREEMPTED and not has_any:
        return ""
    return f": resume it with: {resuming(typed(run.root), Plan.load(run.plan).workload)}"


def say_failure(talk: ConsoleTalk, result: Result, tail_lines: int = TAIL_LINES) -> None:
    for line in failure_lines(result, tail_lines):
        talk.say(line)


def failure_lines(result: Result, tail_lines: int = TAIL_LINES) -> list[str]:
    """Return outcome, exit code, last step, and the tail of the log of the rank that failed
    first."""
    run = RunDir(Path(result.run_dir))
    ended = f"run ended as {result.outcome} (exit {result.exit_code})"
    if result.bad_step is not None:
        more = " and more" if len(result.bad_sample_ids) > MAX_SAMPLE_IDS else ""
        return [
            f"{ended}: the loss or gradient of step {result.bad_step} was not finite, and the"
            f" update was not applied; samples {result.bad_sample_ids[:MAX_SAMPLE_IDS]}{more}"
        ]
    failure = result.failure
    if failure is None:
        return [ended]
    where = f"rank {failure.rank} on {failure.host}, step {failure.step}, in {failure.phase}"
    lines = [ended, f"{where}: {failure.message}"]
    lines += [f"  then {other}" for other in failure.others]
    if not result.outcome.is_refusal and tail_lines:  # a refusal has said all there is to know
        lines.append(f"the end of its log, {typed(run.root / failure.log)}:")
        lines += [f"    {line}" for line in _tail(run.root / failure.log, tail_lines)]
    return lines


def _tail(path: Path, num_lines: int) -> list[str]:
    if not path.is_file():
        return []
    return path.read_text(errors="replace").splitlines()[-num_lines:]


def _val(result: Result) -> str:
    """Say the validation loss, beside it what knowing only the frequency of each byte would
    give."""
    if result.val_loss is None:
        return ""
    text = f", validation loss {number(result.val_loss)}"
    entropy = result.data_facts.get("unigram_entropy")
    if entropy is None:
        return text
    side = "below" if result.val_loss < entropy else "not below"
    return f"{text} nats per byte, {side} the corpus's byte-unigram entropy {number(entropy)}"


def literal(text: str) -> str:
    """Return a text for rich's console that is shown as it is: no markup of rich's, nothing that
    a terminal acts on."""
    return escape(visible(text))


def print_json(text: str) -> None:
    """Print data. A run has ended as it has, even if the disk that stdout goes to takes nothing."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"warning: stdout cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
