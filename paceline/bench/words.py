"""Renders a bench as text: the table of a pair on the terminal, and summary.md."""

from statistics import fmean, geometric_mean

from paceline.bench.records import ArmResult, BenchReport, PairResult, Range
from paceline.records.words import (
    count,
    duration,
    interval,
    number,
    plain,
    ratio,
    size,
    table,
    visible,
)
from paceline.stats.balance import Balance

COLUMNS = (
    "arm",
    "rate",
    "step p50/p90",
    "ratio",
    "memory",
    "saves",
    "exposed",
    "start-up",
    "loss",
    "verdict",
)

MIN_RUNS = 3  # an interval of two runs is honest, and so wide that it says nothing to a reader


def rows_of(pair: PairResult) -> list[tuple[str, ...]]:
    """Return one row per arm, for `COLUMNS`."""
    return [_row(pair, arm) for arm in pair.arms]


def headline(pair: PairResult) -> str:
    """Say in one line what came of a pair."""
    if pair.status != "ok":
        return f"{pair.target}: {pair.status}: {pair.because}"
    others = [arm for arm in pair.measured if arm.name != pair.baseline]
    return f"{pair.target}: {'; '.join(_claim(pair, arm) for arm in others)}"


def summarise(report: BenchReport) -> str:
    """Return the text of summary.md."""
    lines = ["# Bench", ""]
    lines += [f"- {name}: {value}" for name, value in report.hardware.items()]
    for pair in report.pairs:
        lines += ["", f"## {pair.target}: {pair.title}", "", *_facts(pair)]
        if pair.arms:
            lines += ["", table(COLUMNS, rows_of(pair))]
        lines += ["", *profile_lines(pair)] if pair.profiles else []
    if report.gate:
        lines += ["", "## Against the stored expectations", ""]
        lines += [f"- {row}" for row in report.gate]
    return visible("\n".join(lines) + "\n")


def profile_lines(pair: PairResult) -> list[str]:
    """Return what the profiled run of each arm tells, a paragraph each."""
    lines = []
    for profile in pair.profiles:
        said = " ".join(profile.sentences) or f"no profile: {profile.because}"
        where = f" Trace: {profile.trace}" if profile.trace else ""
        lines.append(f"- {profile.arm}, profiled: {plain(said + where)}")
    return lines


def _facts(pair: PairResult) -> list[str]:
    lines = [f"{headline(pair)}.", "", f"- goal: {pair.goal}"]
    lines += [f"- differs: `{key}`: {why}" for key, why in pair.differs.items()]
    if pair.equal:
        lines.append(f"- equal: {', '.join(f'{k} {v}' for k, v in pair.equal.items())}")
        allowed = f"{pair.loss_tolerance:g}" if pair.loss_tolerance else "not compared"
        lines.append(f"- losses may differ by: {allowed} ({pair.loss_because})")
    return lines


def _row(pair: PairResult, arm: ArmResult) -> tuple[str, ...]:
    if not arm.rates:
        return (arm.name, *[""] * (len(COLUMNS) - 2), f"{arm.status}: {arm.because}")
    p50, p90 = arm.step_s_p50 or 0.0, arm.step_s_p90 or 0.0
    return (
        arm.name,
        f"{rate_of(arm)} {_unit(pair)}",
        f"{duration(p50)} / {duration(p90)}",
        speed_ratio(pair, arm),
        size(max(arm.peak_bytes)) if arm.peak_bytes else "",
        memory_ratio(pair, arm),
        "" if arm.exposed_s is None else duration(arm.exposed_s),
        _startup(arm),
        "" if arm.loss_difference is None else f"{arm.loss_difference:.1e}",
        _verdict(pair, arm),
    )


def rate_of(arm: ArmResult) -> str:
    if arm.rate is None or len(arm.rates) < MIN_RUNS:
        return number(geometric_mean(arm.rates))
    return interval(arm.rate.value, arm.rate.low, arm.rate.high)


def _verdict(pair: PairResult, arm: ArmResult) -> str:
    if arm.status == "failed":
        return f"failed: {arm.because}"
    if arm.name == pair.baseline:
        return "baseline"
    return arm.memory_verdict if pair.goal == "memory" else arm.verdict


def _claim(pair: PairResult, arm: ArmResult) -> str:
    against = speed_ratio(pair, arm)
    speed = f"{against} of the rate, {arm.verdict}"
    if pair.per_device:
        busy = f", GPUs {Balance(tuple(arm.busy_percent))}" if arm.busy_percent else ""
        speed = f"scaling efficiency {against}{busy}"
    if pair.goal == "speed":
        return f"{arm.name} {speed}"
    if not arm.peak_bytes:
        return f"{arm.name} memory not known, at {speed}"
    saved = memory_ratio(pair, arm)
    return (
        f"{arm.name} {arm.memory_verdict}: the baseline holds {saved} times its bytes; at {speed}"
    )


def _startup(arm: ArmResult) -> str:
    parts = [duration(arm.startup_s)] if arm.startup_s is not None else []
    if arm.compile_s and arm.compile_s > 0.1:
        parts.append(f"compiling {duration(arm.compile_s)}")
    return ", ".join(parts)


def speed_ratio(pair: PairResult, arm: ArmResult) -> str:
    return _ratio(pair, arm, arm.speedup, arm.rates, pair.arm(pair.baseline).rates)


def memory_ratio(pair: PairResult, arm: ArmResult) -> str:
    """Say how many times less memory than the baseline an arm holds."""
    peaks = [float(each) for each in pair.arm(pair.baseline).peak_bytes]
    return _ratio(pair, arm, arm.memory_ratio, peaks, [float(each) for each in arm.peak_bytes])


def _ratio(
    pair: PairResult, arm: ArmResult, found: Range | None, over: list[float], under: list[float]
) -> str:
    """Write a ratio with its interval; from too few runs the number alone."""
    if arm.name == pair.baseline or not (over and under):
        return span(found)
    if found is not None and min(len(over), len(under)) >= MIN_RUNS:
        return span(found)
    value = fmean(over) / fmean(under) if found is None else found.value
    return f"{value:.3f} (no interval from {count(min(len(over), len(under)), 'run')})"


def span(found: Range | None) -> str:
    return "" if found is None else ratio(found.value, found.low, found.high)


def _unit(pair: PairResult) -> str:
    unit = pair.metric.replace("_per_s", "/s")
    return f"{unit} per device" if pair.per_device else unit
