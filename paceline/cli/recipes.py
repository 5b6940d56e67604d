"""`paceline recipes`: what there is to run, and every key it takes."""

from pathlib import Path
from typing import Any

import typer

from paceline.cli.arguments import JsonFlag


def recipes(
    keys: str = typer.Option("", "--keys", metavar="RECIPE", help="Every key of a recipe."),
    copy: tuple[str, Path] = typer.Option(
        ("", Path()), "--copy", metavar="RECIPE FILE", help="Start your own from this one."
    ),
    as_json: JsonFlag = False,
) -> None:
    """List the recipes; --keys RECIPE shows every key with value, type, default and meaning.

    Example: paceline recipes --copy lm_tiny mine.yaml
    """
    from paceline.cli.talk import print_json

    if copy[0]:
        _copy(*copy)
    elif keys:
        found = _keys_of(keys)
        if as_json:
            print_json(_dumps(found))
        else:
            _print_keys(found)
    else:
        rows = _recipes()
        if as_json:
            print_json(_dumps(rows))
        else:
            for row in rows:
                print(f"{row['name']:<15} {row['about']}")


def _recipes() -> list[dict[str, str]]:
    """Return each recipe with the comment that opens its file."""
    from paceline.config.load import recipe_names, recipe_text

    about = {name: recipe_text(name).splitlines()[0].lstrip("# ") for name in recipe_names()}
    return [{"name": name, "about": text} for name, text in about.items()]


def _keys_of(source: str) -> list[dict[str, Any]]:
    """Return every key with what the recipe sets it to, its type, the schema's default, its
    meaning."""
    from functools import reduce

    from paceline.config.describe import iter_keys
    from paceline.job import load_job

    config = load_job(source, []).config
    return [
        {"value": reduce(getattr, key.path.split("."), config), **key.model_dump()}
        for key in iter_keys(type(config))
    ]


def _print_keys(keys: list[dict[str, Any]]) -> None:
    """Print keys so that they can be searched and pasted behind a command: never folded."""
    for key in keys:
        default = "" if key["value"] == key["default"] else f"; default {key['default']}"
        print(f"{key['path']}={key['value']}   ({key['type']}{default})")
        readers = f" (read by {', '.join(key['read_by'])})" if key["read_by"] else ""
        print(f"    {key['meaning']}{readers}".replace("\n", "\n    "))


def _copy(name: str, target: Path) -> None:
    from paceline.config.load import recipe_text
    from paceline.errors import ConfigError
    from paceline.records.files import write_atomic

    text = recipe_text(name)
    if target.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{target} must end in .yaml to be read as a recipe")
    if target.exists():
        raise ConfigError(f"{target} exists and is not overwritten\nhint: choose another name")
    try:
        write_atomic(target, text)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error
    typer.echo(f"{target}: change it, then: paceline train {target}", err=True)


def _dumps(value: Any) -> str:
    import json

    return json.dumps(value, indent=2, default=str)
