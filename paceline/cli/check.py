"""`paceline check`: are these machines fit to train on? A table, and exit code 0 or 3."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.arguments import JsonFlag, OutOption, Overrides

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.check.records import CheckReport
    from paceline.launch.base import Task
    from paceline.machine.measures import Speed

LARGE_BYTES = 1 << 20


def check(
    overrides: Overrides = None,
    out: OutOption = None,
    as_json: JsonFlag = False,
    snapshot: Path | None = typer.Option(
        None, "--snapshot", metavar="DIR", help="Also keep git_sha, collect_env and nvidia_smi."
    ),
) -> None:
    """Look at the machines before an hour of training is lost: environment, devices, collectives.

    Exit code 0: fit. 3: not fit, and what to do about it.

    Example: paceline check launch.nproc=2
    """
    from paceline.cli.talk import ConsoleTalk, print_json, refusals_on_stdout
    from paceline.cli.together import among_ranks

    talk = ConsoleTalk()
    with among_ranks(_load_task) as rendezvous, refusals_on_stdout(as_json):
        from paceline.check.flow import load_settings, run_check, save_snapshot  # imports torch

        report = run_check(load_settings(overrides or []), out, talk.say, rendezvous)
        if snapshot is not None:
            from paceline.machine.facts import probe

            talk.say(f"snapshot: {snapshot}: {', '.join(save_snapshot(probe(), snapshot))}")
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    raise typer.Exit(report.exit_code)


def _load_task() -> "Task":
    from paceline.check.rank import CHECK

    return CHECK


def _print(report: "CheckReport") -> None:
    from rich.console import Console

    from paceline.cli.talk import literal
    from paceline.records.words import count

    console = Console(highlight=False, soft_wrap=True)
    crew = report.crew
    console.print(
        f"{count(crew.world_size, 'rank')} on {count(crew.num_nodes, 'machine')},"
        f" {crew.device.value}, {crew.backend.value} ({literal(crew.backend.because)})"
    )
    _print_ranks(console, report)
    _print_group(console, report)
    for finding in report.findings:
        console.print(f"{finding.severity}: {literal(str(finding))}")
    verdict = "fit" if report.fit else "not fit"
    console.print(
        f"{verdict}: checked in {report.elapsed_s:.0f} s; record: {literal(report.run_dir)}"
    )


def _print_ranks(console: "Console", report: "CheckReport") -> None:
    from rich.table import Table

    from paceline.cli.talk import literal
    from paceline.machine.measures import MatmulRate
    from paceline.records.words import number

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("rank", "host", "device", "cores", "matmul", "memory copy"):
        table.add_column(column, overflow="fold")
    for rank in report.ranks:
        matmuls, copies, expected = [], [], report.expected.of(rank.rank)
        for rate in rank.rates:
            if isinstance(rate, MatmulRate):
                peak = expected.matmul_tflops.get(rate.precision)
                of = f" of {peak:.0f}" if peak else ""
                matmuls.append(f"{rate.precision} {number(rate.tflop_per_s, 3)}{of} TFLOP/s")
            else:
                copy = expected.copy_gb_per_s
                of = f" of about {copy:.0f}" if copy else ""
                copies.append(f"{number(rate.gb_per_s, 3)}{of} GB/s")
        name = rank.device if rank.device_id == "cpu" else f"{rank.device} {rank.device_id[:12]}"
        table.add_row(
            str(rank.rank),
            literal(rank.host),
            literal(name),
            str(rank.cores),
            "\n".join(matmuls),
            "\n".join(copies),
        )
    if report.ranks:
        console.print(table)


def _print_group(console: "Console", report: "CheckReport") -> None:
    from rich.table import Table

    from paceline.records.words import duration, size

    group = report.group
    if group is None:
        return
    right = group.correctness
    wrong = f"{len(right.wrong)} wrong" if right.wrong else "all exact"
    console.print(f"answers: {right.num_cases} collectives on {right.world_size} ranks, {wrong}")
    for lacking in right.lacking:
        console.print(f"  not tested: {lacking}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("collective", "size", "time", "algorithm", "bus"):
        table.add_column(column, justify="right" if column != "collective" else "left")
    for speed in group.speeds:
        table.add_row(
            speed.op,
            size(speed.num_bytes),
            duration(speed.median_s),
            *_bandwidths(speed),
        )
    console.print(table)
    slowest = min(group.pairs, key=lambda pair: pair.gb_per_s, default=None)
    if slowest is not None:
        expected = report.expected.link
        of = f" of about {expected.gb_per_s:.3g} ({expected.because})" if expected else ""
        links = "1 link" if len(group.pairs) == 1 else f"{len(group.pairs)} links"
        console.print(
            f"pairs: {links}; the slowest, rank {slowest.a} to {slowest.b},"
            f" carries {slowest.gb_per_s:.3g}{of} GB/s"
        )


def _bandwidths(speed: "Speed") -> tuple[str, str]:
    """Return both bandwidths of a large message; for a small one the time is the figure."""
    if speed.num_bytes < LARGE_BYTES:
        return "", ""
    return f"{speed.algbw_gb_per_s:.3g} GB/s", f"{speed.busbw_gb_per_s:.3g} GB/s"
