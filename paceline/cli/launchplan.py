"""`paceline plan --launch`: the launch as it would happen, for people to read and to paste."""

import shlex

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cli.talk import print_json
from paceline.plan.crew import count_ranks
from paceline.records import LaunchPlan

MAX_RANKS = 64


def print_launch(launch: LaunchPlan, as_json: bool) -> None:
    if as_json:
        print_json(launch.to_json())
        return
    console = Console(highlight=False, soft_wrap=True)
    crew = launch.crew
    console.print(
        f"{count_ranks(crew.world_size)}: {crew.num_nodes} x {crew.per_node}, started by"
        f" {launch.launcher} ({escape(crew.launcher.because)})"
    )
    command = shlex.join(launch.argv) or "none: forked from a server that has torch loaded"
    console.print(f"command {escape(command)}")
    console.print(f"fabric  {launch.fabric.value}: {escape(launch.fabric.because)}")
    for name, value in launch.env.items():
        console.print(f"env     {escape(f'{name}={shlex.quote(value)}  # {launch.reasons[name]}')}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("rank", "host", "local rank", "device"):
        table.add_column(column)
    for place in launch.ranks[:MAX_RANKS]:
        device = place.device if place.gpu is None else f"{place.device} (GPU {place.gpu})"
        table.add_row(str(place.rank), escape(place.host), str(place.local_rank), device)
    console.print(table)
    if len(launch.ranks) > MAX_RANKS:
        console.print(f"and {len(launch.ranks) - MAX_RANKS} more; --json lists all")
    for finding in launch.findings:
        console.print(f"{finding.severity}: {escape(str(finding))}")
