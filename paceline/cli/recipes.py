"""`paceline recipes`: what there is to run, and every key it takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.arguments import JsonFlag

if TYPE_CHECKING:
    from paceline.config.describe import Key


def recipes(
    keys: str = typer.Option("", "--keys", metavar="RECIPE", help="Every key of a recipe."),
    copy: tuple[str, Path] = typer.Option(
        ("", Path()), "--copy", metavar="RECIPE FILE", help="Start your own from this one."
    ),
    as_json: JsonFlag = False,
) -> None:
    """List the recipes; --keys RECIPE shows every key with type, default and meaning.

    Example: paceline recipes --copy lm_tiny mine.yaml
    """
    from paceline.cli.talk import print_json

    if copy[0]:
        _copy(*copy)
    elif keys:
        found = _keys_of(keys)
        if as_json:
            print_json(_dumps([key.model_dump() for key in found]))
        else:
            _print_keys(found)
    else:
        rows = _recipes()
        if as_json:
            print_json(_dumps(rows))
        else:
            for row in rows:
                print(f"{row['name']:<12} {row['about']}")


def _recipes() -> list[dict[str, str]]:
    """Each recipe with the comment that opens its file."""
    from paceline.config.load import recipe_names, recipe_text

    about = {name: recipe_text(name).splitlines()[0].lstrip("# ") for name in recipe_names()}
    return [{"name": name, "about": text} for name, text in about.items()]


def _keys_of(source: str) -> list[Key]:
    from paceline.config.describe import iter_keys
    from paceline.job import load_job

    return list(iter_keys(type(load_job(source, []).config)))


def _print_keys(keys: list[Key]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("key", "type", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for key in keys:
        table.add_row(key.path, key.type, str(key.default), key.meaning)
    Console(highlight=False).print(table)


def _copy(name: str, target: Path) -> None:
    from paceline.config.load import recipe_text
    from paceline.errors import ConfigError
    from paceline.files import write_atomic

    text = recipe_text(name)
    if target.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{target} must end in .yaml to be read as a recipe")
    if target.exists():
        raise ConfigError(f"{target} exists and is not overwritten\nhint: choose another name")
    write_atomic(target, text)
    typer.echo(f"{target}: change it, then: paceline train {target}", err=True)


def _dumps(value: Any) -> str:
    import json

    return json.dumps(value, indent=2, default=str)
