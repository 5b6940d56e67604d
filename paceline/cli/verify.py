"""`paceline verify`: does a strategy compute what one process computes? A table, exit 0 or 1."""

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.arguments import JsonFlag, OutOption

if TYPE_CHECKING:
    from paceline.verify.records import StrategyProof, VerifyReport

TABLE_WIDTH = 100
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB] [STRATEGY]... [KEY=VALUE]...",
        help="JOB: a recipe, FILE.yaml or FILE.py:Class; none: a model of ours, which shows most."
        " No strategy: all that can run here, or the job's own.",
    ),
]


def verify(words: Words = None, out: OutOption = None, as_json: JsonFlag = False) -> None:
    """Prove strategies against one process: losses, norms, weights, vetoes and bytes of memory.

    With a job of your own it is that job that is proven: the same samples, on ranks and on one
    process, must give the same losses, metrics and weights.

    Exit code 0: all proven. 1: a check failed, or ranks did not finish.

    Example: paceline verify zero2 zero3 launch.nproc=4, paceline verify my_job.py:Job zero3
    """
    from paceline.cli.talk import ConsoleTalk, print_json, refusals_on_stdout

    talk = ConsoleTalk()
    overrides = [word for word in words or [] if is_setting(word)]
    names = [word for word in words or [] if not is_setting(word)]
    with refusals_on_stdout(as_json):
        from paceline.verify.flow import run_verify  # imports torch

        report = run_verify(names, overrides, out, talk.say)
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    raise typer.Exit(report.exit_code)


def is_setting(word: str) -> bool:
    """Say whether a word is KEY=VALUE, and not the name of a strategy or of a job."""
    return "=" in word and not word.startswith("+experiment=")


def _print(report: "VerifyReport") -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.cli.talk import literal

    # A table that is cut off proves nothing: a narrow terminal wraps it.
    console = Console(highlight=False, soft_wrap=True, width=max(Console().width, TABLE_WIDTH))
    tried = [proof for proof in report.proofs if proof.checks]
    if tried:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for column in ("strategy", *(check.name for check in tried[0].checks), ""):
            table.add_column(column, no_wrap=True)
        for proof in tried:
            table.add_row(proof.strategy, *_cells(proof), "proven" if proof.ok else "FAILED")
        console.print(table)
    for proof in report.proofs:
        for check in proof.checks:
            if not check.ok:
                console.print(
                    f"{proof.strategy}: {check.name} is {literal(check.measured)}, allowed is"
                    f" {literal(check.allowed)}"
                )
        if proof.failure:
            console.print(f"{proof.strategy}: did not finish: {literal(proof.failure)}")
        if proof.skipped:
            console.print(f"{proof.strategy}: not tried: {literal(proof.skipped)}")
    for note in report.notes:
        console.print(f"note: {literal(note)}")
    num_proven = sum(proof.ok and bool(proof.checks) for proof in report.proofs)
    what = f" on {literal(report.job)}" if report.job else ""
    where = f"{report.world_size} ranks ({report.device})"
    console.print(
        f"{num_proven} of {len(report.proofs)} proven{what} on {where} in {report.elapsed_s:.0f} s;"
        f" record: {literal(report.run_dir)}"
    )


def _cells(proof: "StrategyProof") -> list[str]:
    return [check.measured if check.ok else "WRONG" for check in proof.checks]
