"""`paceline watch`: live runs, on the terminal or as a page; or a watchdog for one of them."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.arguments import JsonFlag

if TYPE_CHECKING:
    from paceline.watch.fleet import Fleet

ADDRESS = "localhost:8765"


def watch(
    path: Path = typer.Argument(
        Path("runs/latest"), metavar="RUN_DIR|runs/", help="A run, a sweep, or a folder of them."
    ),
    address: str = typer.Argument("", metavar="[HOST:PORT]", help=f"With --serve; {ADDRESS}."),
    serve: bool = typer.Option(False, "--serve", help="Serve a live page instead."),
    halt: bool = typer.Option(
        False, "--halt", help="Be a watchdog: stop the run (.HALT) when a rule is broken."
    ),
    interval: float | None = typer.Option(
        None, "--interval", min=0.1, help="Seconds between updates; default 1, for a watchdog 30."
    ),
    once: bool = typer.Option(False, "--once", help="Print the current state, and exit."),
    as_json: JsonFlag = False,
) -> None:
    """Watch one run or many: loss, speed, phases and memory by rank, GPUs, events, the log.

    Runs on other machines are followed through the folder that they share with this one.

    Example: paceline watch runs/ --serve
    """
    is_address = re.search(r"^[^/]*:[^/]*$|^\[.*\]$" if serve else r":\d+$", str(path))
    if is_address and not path.exists():
        path, address = Path("runs"), str(path)  # paceline watch --serve HOST:PORT
    if address and not serve:
        raise typer.BadParameter("HOST:PORT is for --serve")
    if halt:
        _be_watchdog(path, interval or 30.0)
        return
    _watch(path, interval or 1.0, address if serve else None, once or as_json, as_json)


def _watch(path: Path, interval: float, address: str | None, once: bool, as_json: bool) -> None:
    import json

    from paceline.cli.talk import print_json
    from paceline.errors import DataError
    from paceline.watch.fleet import Fleet

    if not path.is_dir():
        raise DataError(f"{path} is not a folder\nhint: name a run directory, or one of many runs")
    fleet = Fleet(path.resolve())
    if address is not None:
        from paceline.cli.talk import ConsoleTalk
        from paceline.watch.page import Address, serve

        serve(fleet, Address.parse(address or ADDRESS), ConsoleTalk().say)
        return
    if as_json:
        fleet.scan()
        views = fleet.readers.values() if fleet.is_single else ()
        body = [reader.read().to_dict() for reader in views] or [v.to_dict() for v in fleet.read()]
        print_json(json.dumps(body[0] if fleet.is_single else body, indent=2))
        return
    _show(fleet, interval, once)


def _show(fleet: "Fleet", interval: float, once: bool) -> None:
    """Draw again and again on a terminal, until a single run is over; else print it once."""
    import time

    from rich.console import Console
    from rich.live import Live

    from paceline.cli.watch_screen import draw_list, draw_run

    console = Console(highlight=False, emoji=False)

    def drawn() -> tuple[object, bool]:
        if fleet.is_single:
            fleet.scan()
            view = next(iter(fleet.readers.values())).read()
            return draw_run(view, console.width, console.height), view.state.is_over
        return draw_list(fleet.read(), fleet.names(), fleet.sweeps(), console.height), False

    picture, is_over = drawn()
    if once or is_over or not console.is_terminal:
        console.print(picture)
        return
    with Live(picture, console=console, screen=True, auto_refresh=False) as live:  # type: ignore[arg-type]
        while not is_over:
            time.sleep(interval)
            picture, is_over = drawn()
            live.update(picture, refresh=True)  # type: ignore[arg-type]
    console.print(picture)


def _be_watchdog(path: Path, interval: float) -> None:
    import time

    from paceline.cli.talk import ConsoleTalk
    from paceline.errors import Outcome
    from paceline.watch.watchdog import Watchdog, wait_for_run

    say = ConsoleTalk().say
    run = wait_for_run(path, interval, say)
    dog = Watchdog(run, say)
    say(f"watchdog of {path}: a look every {interval:g} s")
    view = dog.tick()
    while not dog.is_over:
        time.sleep(interval)
        view = dog.tick()
    ended = f"{view.state.kind}: {view.state.said}".rstrip(": ")
    say(f"the run is over after step {view.step} ({ended})")
    print(dog.anomaly or "no anomaly")
    if dog.anomaly or view.state.kind in ("died", "failed"):
        raise typer.Exit(Outcome.CHECK_FAILED.exit_code)
