"""What a sweep answers, from figures whose truth is known: 100 against 120 samples a second."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.records.swept import SweepRecord, SweptCell, SweptPhase
from paceline.report.sweep_story import rate_text
from paceline.stats.figures import Course, RunFigures
from paceline.sweep.folder import COLUMNS, Row
from paceline.sweep.judge import SweepJudgement, judge_figures
from paceline.sweep.phases import choose_finalists
from paceline.sweep.spec import SweepSpec

STEPS = 60
FALLING = tuple(5 - step / 20 for step in range(STEPS))


def figures(rate: float, losses: Sequence[float] = FALLING, iter_ms: float = 10.0) -> RunFigures:
    return RunFigures(
        samples_per_s=rate, tokens_per_s=None, steps_per_s=rate / 8, first_step=6,
        last_step=STEPS, num_compile_steps=0, compile_s=0.0, step_s_p50=0.01, step_s_p90=0.011,
        drift=0.0, standard_error=0.01, blocks_s=(0.01,), tail_mean_iter_p50_ms=iter_ms,
        tail_std_iter_p50_ms=0.1, all_mean_iter_p50_ms=iter_ms, all_std_iter_p50_ms=0.1,
        tail_points_used=6, points=(), tail_loss=losses[-1], losses=tuple(losses), startup_s=1.0,
    )  # fmt: skip


class Sweep:
    """Cells by name, each with figures of its runs."""

    def __init__(self, **asked: Any) -> None:
        self.phases: dict[str, tuple[list[str], int]] = {}
        self.rows: list[Row] = []
        self.figures: dict[str, RunFigures] = {}
        self.asked, self.settings = asked, dict[str, dict[str, str]]()

    def add(
        self, cell: str, runs: Sequence[RunFigures | str], phase: str = "", repeats: int = 3,
        **more: object,
    ) -> "Sweep":  # fmt: skip
        """A run that is a word is a failed one, with that outcome; `more`: columns of its row."""
        name = f"{phase}:{cell}" if phase else cell
        cells, _ = self.phases.setdefault(phase, ([], repeats))
        cells.append(name)
        for number, run in enumerate(runs, 1):
            place = f"runs/{name}_r{number}"
            outcome = run if isinstance(run, str) else "ok"
            known = {
                "group": name, "repeat": number, "run_dir": place, "global_batch": 8,
                "status": "success" if outcome == "ok" else "failed", "outcome": outcome,
                "steps_asked": STEPS, "peak_bytes": 1e9,
            } | more  # fmt: skip
            self.rows.append({column: str(known.get(column, "same")) for column in COLUMNS})
            if isinstance(run, RunFigures):
                self.figures[place] = run
        return self

    @property
    def record(self) -> SweepRecord:
        phases = [
            SweptPhase(name=name, cells=cells, repeats=repeats, steps=STEPS)
            for name, (cells, repeats) in self.phases.items()
        ]
        cells = [
            SweptCell(name=name, settings=self.settings.get(name, {}), overrides=[])
            for phase in phases
            for name in phase.cells
        ]
        known: dict[str, Any] = {
            "mode": "sweep", "recipe": "lm_tiny", "overrides": [], "axes": {}, "cells": cells,
            "phases": phases, "metric": "samples_per_s", "margin": 0.02, "seed": 0,
            "loss_tolerance": 0.02,
        }  # fmt: skip
        return SweepRecord(**(known | self.asked))

    def judge(self) -> SweepJudgement:
        return judge_figures(self.record, self.rows, self.figures)


def around(rate: float, **more: Any) -> list[RunFigures]:
    """Three runs with 1 % between them."""
    return [figures(rate * factor, **more) for factor in (0.99, 1.0, 1.01)]


def verdict(judged: SweepJudgement, name: str) -> str:
    assert judged.standings is not None
    return str(judged.standings.of(name).verdict)


def test_the_faster_cell_wins() -> None:
    judged = Sweep().add("a", around(100)).add("b", around(120)).judge()
    assert judged.winner == "b" and verdict(judged, "a") == "slower"
    assert judged.flagged == {} and judged.notes == []


def test_by_iteration_time_lower_is_better() -> None:
    sweep = Sweep(metric="tail_mean_iter_p50_ms")
    sweep.add("large", [figures(120, iter_ms=20 + n / 10) for n in range(3)], global_batch=16)
    sweep.add("small", [figures(100, iter_ms=10 + n / 10) for n in range(3)], global_batch=8)
    judged = sweep.judge()
    assert judged.winner == "small" and verdict(judged, "large") == "slower"
    assert judged.others is not None and judged.others.best_name == "large"


def learned(value: float, **more: Any) -> list[RunFigures]:
    """Three runs whose best accuracy is about `value`; all else is the same."""
    return [
        replace(figures(100, **more), courses={"val/accuracy": Course(0.1, value * f, value / 2)})
        for f in (0.99, 1.0, 1.01)
    ]


def test_by_a_metric_of_the_job_the_better_cell_wins_and_no_loss_departs() -> None:
    sweep = Sweep(metric="val/accuracy:max", target="val/accuracy>=0.8")
    sweep.add("slow", learned(0.5, losses=tuple(2 * loss for loss in FALLING)))
    judged = sweep.add("quick", learned(0.9)).judge()
    assert judged.winner == "quick" and verdict(judged, "slow") == "worse"
    assert judged.flagged == {} and judged.notes == [] and judged.others is None
    assert judged.target is not None and judged.target.is_met
    least = Sweep(metric="val/accuracy:min").add("a", learned(0.5)).add("b", learned(0.9))
    assert verdict(least.judge(), "a") == "no difference seen", "the least of all is 0.1"


def test_beside_a_metric_of_the_job_stand_its_runs() -> None:
    """An interval of two runs on a log scale ends far above 1, which no accuracy is."""
    sweep = Sweep(metric="val/accuracy:max").add("a", learned(0.5)[::2], repeats=2)
    judged = sweep.add("b", learned(0.9)[::2]).judge()
    assert judged.standings is not None and verdict(judged, "a") == "worse"
    rate = judged.standings.of("b").rate
    assert rate is not None and (rate.low, rate.high) == (0.9 * 0.99, 0.9 * 1.01)
    assert rate_text(judged.standings.of("b"), "val/accuracy") == (
        "0.9 val/accuracy (its runs: 0.891 to 0.909)"
    )


def test_a_run_without_the_metric_is_left_out_and_the_metrics_named() -> None:
    sweep = Sweep(metric="val/wer:min").add("a", learned(0.5)).add("b", learned(0.9))
    assert sweep.judge().winner is None
    none = [replace(each, courses={"val/wer": Course(0.0, 0.0, 0.0)}) for each in learned(0.5)]
    some = [replace(each, courses={"val/wer": Course(0.5, 0.6, 0.5)}) for each in learned(0.5)]
    judged = Sweep(metric="val/wer:min").add("a", none).add("b", some).judge()
    assert judged.winner == "b"
    assert judged.notes == ["a: a run without a value of val/wer:min above 0; there are val/wer"]


def test_a_faster_cell_whose_loss_departs_is_not_crowned() -> None:
    wrong = tuple(loss * 1.1 for loss in FALLING)
    sweep = Sweep().add("a", around(100)).add("wrong", around(200, losses=wrong))
    judged = sweep.add("c", around(100)).judge()
    assert list(judged.flagged) == ["wrong"] and "10.0% apart" in judged.flagged["wrong"]
    assert judged.winner in ("a", "c"), "the flagged one rules nobody out"
    assert judged.standings is not None
    assert {row.group.name for row in judged.standings.winners} == {"a", "c"}
    assert judged.standings.rows[-1].group.name == "wrong"
    assert verdict(judged, "wrong") == "faster" and not judged.standings.rows[-1].is_winner


def test_a_loss_that_departs_on_the_way_is_seen_too() -> None:
    """The ends are equal; the middle is not."""
    hump = [*FALLING[:20], *(loss * 1.2 for loss in FALLING[20:40]), *FALLING[40:]]
    judged = Sweep().add("a", around(100)).add("b", around(100, losses=hump)).judge()
    assert list(judged.flagged) == ["b"]


def test_losses_are_compared_at_equal_batch_only() -> None:
    other = tuple(loss * 0.5 for loss in FALLING)
    sweep = Sweep().add("a", around(100)).add("b", around(100), global_batch=8)
    judged = sweep.add("large", around(120, losses=other), global_batch=16).judge()
    assert judged.flagged == {} and judged.winner == "large"
    assert any(
        "no other cell has the model and global batch of large" in note for note in judged.notes
    )


def test_losses_of_other_models_are_not_compared() -> None:
    other = tuple(loss * 0.5 for loss in FALLING)
    sweep = Sweep().add("a", around(100)).add("b", around(120, losses=other))
    sweep.settings = {"a": {"model.dim": "64"}, "b": {"model.dim": "128"}}
    assert sweep.judge().flagged == {} and sweep.judge().winner == "b"


def test_the_baseline_is_what_losses_are_held_against() -> None:
    other = tuple(loss * 1.1 for loss in FALLING)
    sweep = Sweep(baseline="b").add("a", around(100)).add("b", around(100, losses=other))
    assert list(sweep.judge().flagged) == ["a"]


def test_a_loss_that_is_not_a_number_departs() -> None:
    broken = (*FALLING[:-1], math.nan)
    sweep = Sweep().add("broken", around(100, losses=broken)).add("a", around(90))
    judged = sweep.judge()
    assert list(judged.flagged) == ["broken"] and judged.winner == "a"


@pytest.mark.parametrize("short", [1, 2], ids=["one of two runs", "both runs"])
def test_a_run_whose_losses_are_cut_short_departs(short: int) -> None:
    """As in a training.csv that somebody has damaged."""
    cut = [figures(300.0, FALLING[:2] if n < short else FALLING) for n in range(2)]
    judged = Sweep().add("a", around(100.0)).add("b", cut).judge()
    assert list(judged.flagged) == ["b"]


def test_short_runs_are_not_flagged_for_being_short() -> None:
    sweep = Sweep().add("a", around(100, losses=(5.0, 4.0, 3.0)))
    assert sweep.add("b", around(100, losses=(5.0, 4.0, 3.0))).judge().flagged == {}


@pytest.mark.parametrize(
    ("target", "state"),
    [("speedup>=1.1", "met"), ("speedup>=1.5", "missed"), ("speedup>=1.19", "open")],
)
def test_a_target_is_met_by_the_whole_interval(target: str, state: str) -> None:
    sweep = Sweep(baseline="a", target=target).add("a", around(100)).add("b", around(120))
    found = sweep.judge().target
    assert found is not None and (found.state, found.group) == (state, "b")


@pytest.mark.parametrize(
    ("target", "state"),
    [("samples_per_s>=110", "met"), ("samples_per_s>=130", "missed"),
     ("tail_mean_iter_p50_ms<=11", "met"), ("tail_mean_iter_p50_ms<=9", "missed")],
)  # fmt: skip
def test_a_target_of_a_figure(target: str, state: str) -> None:
    sweep = Sweep(target=target).add("a", around(100)).add("b", around(120))
    found = sweep.judge().target
    assert found is not None and found.state == state


def test_a_figure_that_no_run_has_leaves_the_target_open() -> None:
    found = Sweep(target="tokens_per_s>=3").add("a", around(100)).judge().target
    assert found is not None and found.state == "open" and "no interval" in found.because


def test_a_failed_baseline_is_told_as_such() -> None:
    sweep = Sweep(baseline="a", target="speedup>=1.1").add("a", ["crashed"] * 3)
    judged = sweep.add("b", around(120)).judge()
    assert judged.target is not None and judged.target.state == "missed"
    assert "the baseline a has no figure" in judged.target.because
    assert any("the baseline a has no figure" in note for note in judged.notes)
    assert judged.winner == "b"


def test_nothing_measured_is_no_winner() -> None:
    judged = Sweep(target="samples_per_s>=1").add("a", ["crashed", "nan", "oom"]).judge()
    assert judged.winner is None and judged.standings is None
    assert judged.target is not None and judged.target.state == "missed"


def test_runs_of_an_earlier_question_do_not_count() -> None:
    """The manifest holds repeats and lengths of an earlier call; neither is a repeat of this."""
    sweep = Sweep().add("a", around(100), repeats=2).add("b", around(120), repeats=2)
    assert sweep.judge().standings is not None
    standings = sweep.judge().standings
    assert standings is not None and [len(row.group.values) for row in standings.rows] == [2, 2]
    assert Sweep().add("a", around(100), steps_asked=30).judge().standings is None


def test_a_phase_that_has_just_begun_does_not_overrule() -> None:
    sweep = Sweep(baseline="slow")
    for cell, rate in (("slow", 50), ("middle", 100), ("fast", 150)):
        sweep.add(cell, around(rate), phase="A")
    sweep.add("slow", around(50)[:1], phase="B").add("fast", [], phase="B")
    judged = sweep.judge()
    assert judged.winner == "A:fast"
    assert any("phase B was begun" in note for note in judged.notes)
    stopped = sweep.add("other", ["interrupted"], phase="B").judge()
    assert stopped.winner == "A:fast"


def test_the_last_phase_that_has_ended_decides() -> None:
    sweep = Sweep()
    sweep.add("a", around(100), phase="A").add("b", around(101), phase="A")
    sweep.add("a", around(100), phase="B").add("b", [*around(120)[:2], "crashed"], phase="B")
    judged = sweep.judge()
    assert judged.winner == "B:b" and len(judged.earlier) == 1


def test_one_that_is_tied_only_for_want_of_repeats_is_not_chosen() -> None:
    wide = [figures(rate) for rate in (60.0, 100.0, 150.0)]
    judged = Sweep().add("wide", wide, peak_bytes=1.0).add("b", around(130), peak_bytes=2.0).judge()
    assert judged.standings is not None
    assert [row.group.name for row in judged.standings.winners] == ["b", "wide"]
    assert judged.winner == "b"


def test_among_equals_less_memory_wins() -> None:
    judged = (
        Sweep().add("a", around(100), peak_bytes=2e9).add("b", around(99.5), peak_bytes=1e9).judge()
    )
    assert judged.winner == "b"


def test_finalists_are_all_that_may_be_the_best() -> None:
    sweep = Sweep(baseline="slow")
    rates = {"slow": 50, "near": 99.5, "best": 100, "far": 70}
    for cell, rate in rates.items():
        sweep.add(cell, around(rate), phase="A")
    standings = sweep.judge().standings
    assert standings is not None
    names = [cell.name for cell in choose_finalists(sweep.record, asked(), standings)]
    assert names == ["slow", "near", "best"]


def test_there_are_at_least_two_finalists() -> None:
    sweep = Sweep()
    for cell, rate in (("a", 50), ("b", 100), ("c", 70)):
        sweep.add(cell, around(rate), phase="A")
    standings = sweep.judge().standings
    assert standings is not None
    assert [cell.name for cell in choose_finalists(sweep.record, asked(), standings)] == ["b", "c"]


def test_a_pilot_without_repeats_is_a_shortlist_of_as_many_as_asked_for() -> None:
    sweep = Sweep()
    for cell, rate in (("a", 50), ("b", 100), ("c", 70), ("d", 99)):
        sweep.add(cell, [figures(rate)], phase="A")
    standings = sweep.judge().standings
    assert standings is not None
    for spec, names in (
        (asked(pilot_repeats=1), ["b", "d"]),
        (asked(pilot_repeats=1, finalists=3), ["b", "c", "d"]),
        (asked(finalists=2), ["b", "d"]),
    ):
        assert [cell.name for cell in choose_finalists(sweep.record, spec, standings)] == names


def asked(**given: Any) -> SweepSpec:
    return SweepSpec(recipe="lm_tiny", phases=True, **given)


def test_code_that_changed_between_runs_is_noted() -> None:
    sweep = Sweep().add("a", around(100)).add("b", around(100))
    sweep.rows[0] = sweep.rows[0] | {"code_fingerprint": "other"}
    assert any("not all runs have the same code" in note for note in sweep.judge().notes)
