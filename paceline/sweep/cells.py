"""Axes into cells, and a cell by its name or a part of it. No torch: `compare` reads sweeps too."""

from collections.abc import Iterable, Sequence
from itertools import product

from paceline.errors import ConfigError
from paceline.records.swept import SweptCell
from paceline.sweep.spec import SweepSpec, shown_value, split_values

MAX_NAMED = 20


def draw_cells(spec: SweepSpec) -> list[SweptCell]:
    """Every combination, the last axis fastest."""
    short = short_keys(spec.axes)
    cells = []
    for values in product(*spec.axes.values()):
        settings = {key: shown_value(value) for key, value in zip(spec.axes, values, strict=True)}
        name = ",".join(f"{short[key]}={text}" for key, text in settings.items())
        cells.append(
            SweptCell(
                name=" ".join(name.split()),  # a manifest keeps no other white space
                settings=settings,
                overrides=[f"{key}={text}" for key, text in settings.items()],
            )
        )
    return cells


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """The shortest end of each key that no other key has."""
    parts = {key: key.split(".") for key in keys}

    def ends(key: str, length: int) -> str:
        return ".".join(parts[key][-length:])

    short = {}
    for key in parts:
        lengths = range(1, len(parts[key]) + 1)
        short[key] = next(
            (ends(key, n) for n in lengths if sum(ends(k, n) == ends(key, n) for k in parts) == 1),
            key,
        )
    return short


def find_cell(cells: Sequence[SweptCell], asked: str) -> SweptCell:
    """The cell of that name, or the only one that has all of its `key=value` parts."""
    wanted = {part.strip() for part in split_values(asked)}
    exact = [cell for cell in cells if cell.name == asked]
    fitting = exact or [cell for cell in cells if wanted <= _words(cell)]
    names = "\n".join(f"  {cell.name}" for cell in (fitting or cells)[:MAX_NAMED])
    if not fitting:
        raise ConfigError(f"'{asked}' is not a cell; the cells are\n{names}")
    if len(fitting) > 1:
        raise ConfigError(f"'{asked}' fits {len(fitting)} cells\n{names}")
    if fitting[0].refusal:
        raise ConfigError(f"{fitting[0].name} cannot run: {fitting[0].refusal}")
    return fitting[0]


def _words(cell: SweptCell) -> set[str]:
    return {*split_values(cell.name), *cell.overrides}
