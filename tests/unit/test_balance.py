"""How busy the GPUs of a run were."""

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.records.tables import TelemetryRow
from paceline.stats.balance import Balance, balance_of


def rows(source: str, values: list[float]) -> list[TelemetryRow]:
    return [
        TelemetryRow(float(second), source, {"utilisation_percent": value})
        for second, value in enumerate(values)
    ]


def plan_of(per_node: int) -> Any:
    return SimpleNamespace(crew=SimpleNamespace(per_node=per_node, device_indices=[]))


@pytest.mark.parametrize(
    ("second", "told"),
    [
        ([0, 70, 80, 78, 0], "70 to 76% busy: balanced"),
        ([0, 5, 4, 6, 0], "5 to 70% busy: 1 of 2 below 60%"),
        ([0, 0, 0, 0, 0], "0 to 70% busy: 1 of 2 below 60%"),
        ([99, 99, 98], "70 to 99% busy: 29 points apart"),
    ],
)
def test_every_gpu_shall_work_about_as_much(second: list[float], told: str) -> None:
    found = [*rows("gpu0", [0, 0, 70, 71, 69, 0]), *rows("gpu1", second), *rows("gpu2", [0] * 9)]
    balance = balance_of([(0, found)], plan_of(2))
    assert str(balance) == told
    assert isinstance(balance, Balance) and balance.is_balanced == told.endswith("balanced")


def test_no_gpu_no_balance() -> None:
    assert balance_of([(0, rows("host", [50.0] * 9))], plan_of(1)) is None
