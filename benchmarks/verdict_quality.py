"""How often verdicts are right: thousands of simulated sweeps whose truth is known.

    OMP_NUM_THREADS=1 python benchmarks/verdict_quality.py [SWEEPS]

The noise model:
- a run's speed departs from its cell's by a factor with sd 1 % (another machine state, placement);
- its step times are AR(1) with sd 2 % and correlation rho = 0, 0.5 or 0.9 between neighbours;
- 1 % of its steps, anywhere, take about twice the time (1.5 to 2.5 times);
- its first 25 steps fall from 2x to 1x: the warm-up, which the finder has to find;
- a run has 600 steps. Pairs of runs of 60 and 300 are shown too: the shorter a run, the more of
  what its steps scatter is left in its rate, and the more repeats it takes.
A rate goes through the same code as that of a real run: warm-up found, work over time. Goals: at
most 5 % of A/A sweeps of 12 equal cells with any false "faster"; a planted 3 % between two cells
at 5 repeats found in 90 %; intervals that cover the truth in 93 to 97 %. Lines without a goal are
there to be known. Exit code 1 where a goal is missed.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from paceline.stats.intervals import Interval
from paceline.stats.standings import Group, Standings, compare_groups
from paceline.stats.steady import count_warmup

Floats = NDArray[np.float64]
CELLS, MOST_RUNS = 12, 5
GAIN = 1.03
CLAIMS = ("faster", "slower")


@dataclass(frozen=True)
class Model:
    """Relative to a step of 1 second of 1 sample."""

    rho: float
    steps: int = 600
    run_sd: float = 0.01
    step_sd: float = 0.02
    spike_share: float = 0.01
    ramp_steps: int = 25

    @property
    def true_rate(self) -> float:
        return 1 / (1 + self.spike_share)  # a spike costs one more second on average


def simulate_steps(rng: np.random.Generator, model: Model, num_runs: int) -> Floats:
    """Step times, one row a run."""
    shape, settle = (num_runs, model.steps), 100  # until AR(1) has forgotten its start
    shocks = rng.normal(size=(num_runs, model.steps + settle)) * math.sqrt(1 - model.rho**2)
    step_s = 1 + model.step_sd * lfilter([1], [1, -model.rho], shocks, axis=1)[:, settle:]
    step_s += (rng.random(shape) < model.spike_share) * rng.uniform(0.5, 1.5, shape)
    step_s[:, : model.ramp_steps] += np.linspace(1, 0, model.ramp_steps, endpoint=False)
    return np.asarray(step_s * np.exp(model.run_sd * rng.normal(size=(num_runs, 1))))


def measure_rates(step_s: Floats) -> tuple[Floats, Floats]:
    """Of each run: its rate after the warm-up that was found, and how long that was."""
    cuts = np.array([count_warmup(row) for row in step_s])
    rates = [1 / row[cut:].mean() for row, cut in zip(step_s, cuts, strict=True)]
    return np.array(rates), cuts


def simulate_sweeps(
    rng: np.random.Generator, model: Model, num_sweeps: int
) -> tuple[Floats, Floats]:
    """Rates of shape (sweep, cell, run), and the warm-ups found."""
    parts = [
        measure_rates(simulate_steps(rng, model, CELLS * MOST_RUNS)) for _ in range(num_sweeps)
    ]
    rates = np.array([rates for rates, _ in parts]).reshape(num_sweeps, CELLS, MOST_RUNS)
    return rates, np.concatenate([cuts for _, cuts in parts])


def compare(cells: Floats, baseline: bool = False) -> Standings:
    groups = [Group(f"c{n}", tuple(runs)) for n, runs in enumerate(cells.tolist())]
    return compare_groups(groups, baseline="c1" if baseline else None)


def claims(standings: Standings, kind: str) -> bool:
    return any(row.verdict.kind == kind for row in standings.rows)


def covers(interval: Interval | None, truth: float) -> bool:
    return interval is not None and interval.low <= truth <= interval.high


def share(flags: list[bool]) -> float:
    return float(np.mean(flags))


@dataclass(frozen=True)
class Line:
    text: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_missed(self) -> bool:
        return not (self.low or 0.0) <= self.value <= (1.0 if self.high is None else self.high)

    def __str__(self) -> str:
        if self.low is None and self.high is None:
            return f"       {self.value:7.2%}  {self.text}"
        goal = f"{self.low or 0:.0%} to {1 if self.high is None else self.high:.0%}"
        return (
            f"  {'MISS' if self.is_missed else 'OK':4} {self.value:7.2%}  {self.text} (goal {goal})"
        )


def iter_equal_cells(rates: Floats) -> Iterator[Line]:
    """A/A: every claim is false. Two repeats are shown for comparison."""
    for runs in (2, 3, 5):
        for baseline in (False, True):
            found = [compare(cells[:, :runs], baseline) for cells in rates]
            place = (
                f"12 equal cells, {runs} repeats, against the {'baseline' if baseline else 'best'}"
            )
            faster, slower = (share([claims(s, kind) for s in found]) for kind in CLAIMS)
            yield Line(f'{place}: any "faster"', faster, high=0.05 if runs > 2 else None)
            yield Line(f'{place}: any "slower"', slower)
            covered = [all(covers(row.speedup, 1) for row in s.rows) for s in found]
            yield Line(f"{place}: all intervals of ratios cover at once", share(covered))


def iter_one_noisy(rng: np.random.Generator, rates: Floats) -> Iterator[Line]:
    """The same with a run-to-run sd of 4 % in one of the cells."""
    noisy = rates.copy()
    noisy[:, -1] *= np.exp(math.sqrt(0.04**2 - 0.01**2) * rng.normal(size=noisy[:, -1].shape))
    for runs in (2, 3, 5):
        for baseline in (False, True):
            found = [compare(cells[:, :runs], baseline) for cells in noisy]
            against = "the baseline" if baseline else "the best"
            wrong = [any(claims(s, kind) for kind in CLAIMS) for s in found]
            yield Line(
                f"12 equal cells, one 4x noisier, {runs} repeats, against {against}: any claim",
                share(wrong),
            )


def iter_planted(rates: Floats) -> Iterator[Line]:
    """Cell 0 is 3 % faster than it was."""
    planted = rates.copy()
    planted[:, 0] *= GAIN
    for runs in (3, 5):
        pairs = [compare(cells[:2, :runs]) for cells in planted]
        right = [s.best_name == "c0" and s.best.verdict.kind == "faster" for s in pairs]
        goal = 0.90 if runs == 5 else None
        yield Line(f"a pair, 3 % planted, {runs} repeats: found", share(right), low=goal)
        missed = [s.best.verdict.kind == "no difference seen" for s in pairs]
        yield Line(f'a pair, 3 % planted, {runs} repeats: "no difference seen"', share(missed))
        named = [compare(cells[:, :runs], baseline=True) for cells in planted]
        yield Line(
            f"3 % planted in one of 12 cells, {runs} repeats: found against the baseline",
            share([s.of("c0").verdict.kind == "faster" for s in named]),
        )
        yield Line(
            f"3 % planted in one of 12 cells, {runs} repeats: it is among the winners",
            share([s.of("c0").is_winner for s in named]),
        )


def iter_coverage(rates: Floats, truth: float) -> Iterator[Line]:
    """Of a cell's rate, and of the ratio of two cells; three pairs of cells a sweep."""
    pairs = rates.reshape(-1, 2, 10)  # cells are equal, so two of five runs are one of ten
    for runs in (3, 5, 10):
        found = [compare(cells[:, :runs], baseline=True) for cells in pairs]
        covered = [covers(row.rate, truth) for s in found for row in s.rows]
        yield Line(f"{runs} runs: the interval of a rate covers", share(covered), 0.93, 0.97)
        covered = [covers(s.of("c0").speedup, 1) for s in found]
        yield Line(f"{runs} runs: that of the ratio of two cells", share(covered), 0.93, 0.97)


def iter_short_runs(rng: np.random.Generator, rho: float, num_sweeps: int) -> Iterator[Line]:
    """Where spikes and correlation average out less, there is more noise to see through."""
    for steps in (60, 300):
        model = Model(rho, steps=steps, ramp_steps=min(25, steps // 6))
        step_s = simulate_steps(rng, model, num_sweeps * 10)
        rates, _ = measure_rates(step_s)
        pairs = rates.reshape(num_sweeps, 2, 5)
        pairs[:, 0] *= GAIN
        found = [compare(cells) for cells in pairs]
        right = [s.best_name == "c0" and s.best.verdict.kind == "faster" for s in found]
        yield Line(f"a pair, 3 % planted, 5 repeats, runs of {steps} steps: found", share(right))


def measure(rho: float, num_sweeps: int, seed: int = 6) -> Iterator[Line]:
    rng = np.random.default_rng([seed, round(100 * rho)])
    model = Model(rho)
    rates, cuts = simulate_sweeps(rng, model, num_sweeps)
    low, middle, high = np.quantile(cuts, [0.1, 0.5, 0.9])
    print(
        f"\nrho {rho}: warm-up found after {cuts.mean():.1f} steps (10 % {low:.0f}, median"
        f" {middle:.0f}, 90 % {high:.0f}; the ramp has {model.ramp_steps}); sd of a run's rate"
        f" {np.log(rates).std():.2%}, mean {rates.mean() / model.true_rate - 1:+.3%} off the truth"
    )
    yield from iter_equal_cells(rates)
    yield from iter_planted(rates)
    yield from iter_coverage(rates, model.true_rate)
    yield from iter_one_noisy(rng, rates)
    yield from iter_short_runs(rng, rho, num_sweeps)


def main() -> int:
    num_sweeps = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print((__doc__ or "").partition("The noise model")[2].join(["The noise model", ""]).rstrip())
    print(f"\n{num_sweeps} sweeps of {CELLS} cells for each rho")
    missed = 0
    for rho in (0.0, 0.5, 0.9):
        for line in measure(rho, num_sweeps):
            print(line, flush=True)
            missed += line.is_missed and not (line.low is None and line.high is None)
    print(f"\n{missed} goals missed" if missed else "\nall goals met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
