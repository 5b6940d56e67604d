"""Evidence for tests of judgements: steps of ranks that wait for each other, as real ones do."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.config.health import RulesConfig
from paceline.health import Evidence
from paceline.health.evidence import Heart
from paceline.records.cells import DTYPES
from paceline.records.columns import Layout, Table
from paceline.records.heartbeats import Beat
from paceline.records.phases import OWN_PHASES, Phase
from paceline.records.tables import STEPS, TELEMETRY, TRAINING
from tests.machines import box, plan

USUAL_S = {
    Phase.DATA: 0.001, Phase.FORWARD: 0.010, Phase.BACKWARD: 0.020, Phase.OPTIMIZER: 0.002,
    Phase.OTHER: 0.0005,
}  # fmt: skip
EXCHANGE_S = 0.002
WARMUP = 5


def make_table(layout: Layout[Any], rows: int, **columns: Any) -> Table[Any]:
    """Return a table with these columns; the others are empty where they may be, else 0."""
    values, empty = {}, {}
    for name, kind in layout.columns.items():
        given = columns.get(name)
        plain = np.zeros(rows, DTYPES[kind]) if kind is not str else np.full(rows, "", object)
        values[name] = plain if given is None else np.broadcast_to(given, rows).astype(DTYPES[kind])
        if name in layout.optional:
            empty[name] = np.full(rows, given is None)
    return Table(layout, values, empty)


def make_evidence(
    extra: Mapping[int, Mapping[Phase, Any]] | None = None,
    num_ranks: int = 2,
    num_steps: int = 60,
    noise: float = 0.03,
    seed: int = 0,
    knows_blocked: bool = True,
    **more: Any,
) -> Evidence:
    """Return the steps of ranks of which some take `extra` seconds in a phase, a number or one for
    each step. Every rank waits at the end of backward for the last one, and again after its
    update, as in DDP."""
    rng = np.random.default_rng(seed)
    own = {
        rank: {
            phase: usual * np.abs(1 + noise * rng.standard_normal(num_steps))
            + (extra or {}).get(rank, {}).get(phase, 0.0)
            for phase, usual in USUAL_S.items()
        }
        for rank in range(num_ranks)
    }
    first = [sum(own[r][p] for p in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD)) for r in own]
    second = [own[r][Phase.OPTIMIZER] for r in own]
    steps = {}
    for rank, parts in own.items():
        waits = {
            Phase.BACKWARD: EXCHANGE_S + np.max(first, axis=0) - first[rank],
            Phase.OTHER: np.max(second, axis=0) - second[rank],
        }
        columns: dict[str, Any] = {p.column: s + waits.get(p, 0.0) for p, s in parts.items()}
        if knows_blocked:
            columns |= {p.blocked_column: waits.get(p, 0.0) for p in OWN_PHASES}
        columns["wall_s"] = sum(columns[p.column] for p in OWN_PHASES)
        columns["step"] = np.arange(1, num_steps + 1)
        columns["warmup"] = columns["step"] <= WARMUP
        steps[rank] = make_table(STEPS, num_steps, **columns)
    return Evidence(num_ranks, steps=steps, **more)


def make_all(rules: RulesConfig) -> Evidence:
    """Return evidence in which every rule has something to look at: two GPUs, a live run."""
    telemetry = make_telemetry(100, "gpu0", utilisation_percent=99.0, clock_mhz=1980.0)
    evidence = make_evidence(
        rules=rules,
        plan=plan("launch.nproc=2", machine=box(2)),
        training=make_training(400, **{"train/gate_entropy": 1.0, "train/gate_collapse": 0.0}),
        telemetry={0: telemetry},
        hearts={rank: Heart(Beat(1e9, rank, 9, "data", 9), 1e9) for rank in (0, 1)},
        now=1e9,
        idle_s=1.0,
    )
    for table in evidence.steps.values():
        table.values["units"][:], table.is_empty["units"][:] = 1.0, False
    return evidence


def make_training(num_steps: int, **columns: Any) -> Table[Any]:
    steps = np.arange(1, num_steps + 1)
    usual = {"loss": 5 - 0.001 * steps, "grad_norm": 1.0, "step_s": 0.03, "samples_per_s": 100.0}
    return make_table(TRAINING.of_file(list(columns)), num_steps, step=steps, **(usual | columns))


def make_telemetry(num_rows: int, source: str = "host", **columns: Any) -> Table[Any]:
    """Return samples, one per second."""
    return make_table(TELEMETRY, num_rows, time=1e9 + np.arange(num_rows), source=source, **columns)
