"""The command line: one thin file per verb. Only this package prints and exits.

stdout is data, stderr is talk. torch is imported by the verbs that need it, inside them, so that
help answers at once.
"""

import errno
import io
import os
import signal
import sys
import traceback
from pathlib import Path

import typer

from paceline.cli import (
    bench,
    check,
    checkpoints,
    compare,
    data,
    demo,
    diagnose,
    drill,
    export,
    generate,
    plan,
    prepare,
    prepare_speech,  # noqa: F401  (it adds its commands to prepare)
    recipes,
    report,
    sweep,
    train,
    transcribe,
    verify,
    watch,
)
from paceline.cli.arguments import Verbs
from paceline.errors import (
    ConfigError,
    DiskError,
    JobError,
    Outcome,
    PacelineError,
    users_line,
)
from paceline.machine.process import leave_at_once

# What a person can change about a name that was given, by the number of the error.
WRONG_PLACES = {
    errno.EACCES: "run as a user who may, or choose another place",
    errno.EPERM: "run as a user who may, or choose another place",
    errno.EISDIR: "a folder stands where a file belongs: move it, or choose another place",
    errno.ENOTDIR: "a file stands where a folder belongs: move it, or choose another place",
    errno.ELOOP: "a link leads to itself: remove it",
    errno.ENAMETOOLONG: "choose a shorter name",
}
app = typer.Typer(
    name="paceline",
    cls=Verbs,
    help="Take a PyTorch training job from bare machines to a finished, explained run.\n\n"
    "Start with: paceline demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(demo.demo)
app.command()(check.check)
app.command()(recipes.recipes)
app.command()(plan.plan)
app.command()(train.train)
app.command()(verify.verify)
app.command()(sweep.sweep)
app.command()(compare.compare)
app.command()(report.report)
app.command()(watch.watch)
app.command()(diagnose.diagnose)
app.command("import")(diagnose.import_files)
app.command()(generate.generate)
app.command()(drill.drill)
app.command()(export.export)
app.command()(transcribe.transcribe)
app.add_typer(bench.app, name="bench")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(prepare.app, name="prepare")
app.add_typer(data.app, name="data")


@app.callback(invoke_without_command=True)
def version(
    show: bool = typer.Option(False, "--version", help="Print the version and leave."),
    # DeepSpeed's launcher puts it in front of the verb; the environment says the same.
    local_rank: int = typer.Option(0, "--local_rank", "--local-rank", hidden=True),
) -> None:
    if show:
        from paceline import __version__

        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; every refusal is one message and its exit code."""
    # A request for stacks must not kill a process that has none to show yet, or no more.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    leave_at_once()
    _show_what_can_be_shown()
    _guard_stderr()
    try:
        _run()
    finally:
        _flush_stdout()


def _show_what_can_be_shown() -> None:
    """Let a terminal whose locale lacks a character show another in its place."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")


def _guard_stderr() -> None:
    """Let a full disk, to which stderr may go, end no run."""
    try:
        number = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # there is none, or it is no file
        return
    if not os.isatty(number) and "--help" not in sys.argv:  # which answers at once
        from paceline.records.disk import LOG_BYTES, Appender, LogStream

        file = Appender(Path("stderr"), hold=LOG_BYTES, handle=number)
        sys.stderr = LogStream.open_text(file, number)


def _run() -> None:
    try:
        app()
    except PacelineError as error:
        from paceline.cli.talk import print_problems

        print_problems(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(Outcome.INTERRUPTED.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of stdout left, as `head` does
        sys.exit(0)
    except Exception as error:
        if (known := _known(error)) is not None:
            from paceline.cli.talk import print_problems

            print_problems(known)
            sys.exit(known.exit_code)
        from paceline.records.words import visible

        print(visible(traceback.format_exc()), end="", file=sys.stderr)
        print("this is a bug in Paceline: please report it with the lines above", file=sys.stderr)
        sys.exit(Outcome.CRASHED.exit_code)


def _known(error: Exception) -> PacelineError | None:
    """Return what a person should know of an error that is not a bug of ours: of a disk that takes
    nothing, a file that this user may not touch, a name that cannot be one, a line of the job's own
    code. None of others."""
    if isinstance(error, OSError) and (hint := WRONG_PLACES.get(error.errno or 0)):
        what = error.filename if isinstance(error.filename, str) else "a file"
        return ConfigError(f"{what}: {error.strerror}\nhint: {hint}")
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # pathlib's own
        return ConfigError(f"{error}\nhint: {WRONG_PLACES[errno.ELOOP]}")
    if isinstance(error, OSError) and DiskError.is_meant(error):
        return DiskError.of(error)
    if place := users_line(error):
        return JobError(f"{place}: {type(error).__name__}: {error}")
    return None


def _flush_stdout() -> None:
    """Write out what was printed. Where nobody takes it the exit code is the run's own all the
    same: Python would leave with 120."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # as `head` leaves one
            print(f"warning: stdout cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
