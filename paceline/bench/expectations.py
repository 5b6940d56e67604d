"""Stored results of a machine, and whether new ones are shown to be worse: a gate for CI.

There is one file per hardware, `expectations_<key>.json`, with the values of every run, so that
the new runs are held against them by an interval and not by a threshold on two means. Other
hardware, another config or other data is refused: such figures do not compare.
"""

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from paceline import __version__
from paceline.bench.pairs import Pair
from paceline.bench.records import ArmResult, GateRow, PairResult, Range
from paceline.config.describe import differing, flatten
from paceline.errors import ConfigError
from paceline.records import Env, Fingerprints, Part, Record
from paceline.stats.standings import Group, compare_groups

# Two days on one machine differ by more than two runs of one hour do.
MARGIN = 0.05
CONFIDENCE = 0.95  # that none of all checks together fails by chance
MIN_REPEATS = 2
MAX_NAMED = 8


class StoredArm(Part):
    config: dict[str, Any]
    rates: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]
    peak_bytes: list[Annotated[int, Field(ge=1)]]
    fingerprints: Fingerprints


class StoredPair(Part):
    saved_at: str
    version: str
    torch: str
    metric: str
    baseline: str
    steps: int
    arms: dict[str, StoredArm]

    @model_validator(mode="after")
    def _has_its_baseline(self) -> Self:
        if self.baseline not in self.arms:
            raise ValueError(f"its baseline {self.baseline} is none of its arms")
        return self


class Expectations(Record):
    hardware_key: str
    hardware: dict[str, str]
    pairs: dict[str, StoredPair]

    @classmethod
    def find(cls, path: Path, env: Env) -> Self:
        """Load the file of this hardware, from a folder or by its own path; `ConfigError` where
        there is none."""
        file = file_in(path, env)
        if not file.is_file():
            others = sorted(other.name for other in path.glob("expectations_*.json"))
            there = f"; there are {', '.join(others)}" if others else ""
            raise ConfigError(
                f"{file} does not exist: nothing is stored for this hardware{there}\n"
                f"hint: paceline bench run ... --save-expectations {path}"
            )
        found = cls.load(file)
        changed = list(differing(found.hardware, hardware_of(env)))
        if changed:
            lines = "\n".join(f"  {difference}" for difference in changed)
            raise ConfigError(
                f"{file} is of other hardware, and figures of two machines do not compare:\n{lines}"
                "\nhint: save this machine's own with --save-expectations"
            )
        return found

    def require_same_work(self, pairs: Sequence[Pair], repeats: int) -> None:
        """Refuse, before anything runs, a pair that is not stored with this very config."""
        problems = [problem for pair in pairs for problem in self._problems(pair)]
        require_repeats(repeats)
        if problems:
            raise ConfigError(
                [f"cannot be compared with what is stored: {problem}" for problem in problems]
            )

    def _problems(self, pair: Pair) -> Iterator[str]:
        name = pair.target.name
        stored = self.pairs.get(name)
        if pair.skipped:
            if stored is not None:
                yield f"{name} is stored, and is skipped now: {pair.skipped}"
            return
        if stored is None:
            yield f"{name} is not stored\nhint: save it with --save-expectations"
            return
        now = {arm.name: config_of(pair, arm.name) for arm in pair.arms}
        if now.keys() != stored.arms.keys():
            yield f"{name} has the arms {', '.join(now)}, not {', '.join(stored.arms)}"
            return
        changed = dict.fromkeys(
            str(difference)
            for arm, config in now.items()
            for difference in differing(stored.arms[arm].config, config)
        )
        if changed:
            more = f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
            yield f"{name} ran with another config: {'; '.join([*changed][:MAX_NAMED])}{more}"

    @classmethod
    def merge(
        cls, path: Path, env: Env, results: Sequence[PairResult], pairs: Sequence[Pair]
    ) -> Path:
        """Write the new values of these pairs; those of others stay as they are."""
        file = file_in(path, env)
        kept = cls.find(file, env).pairs if file.is_file() else {}
        planned = {pair.target.name: pair for pair in pairs}
        new = {
            result.target: _stored(result, planned[result.target], env)
            for result in results
            if result.status == "ok"
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        cls(hardware_key=key_of(env), hardware=hardware_of(env), pairs=kept | new).save(file)
        return file


def require_repeats(repeats: int) -> None:
    if repeats < MIN_REPEATS:
        raise ConfigError(
            f"{repeats} run per side cannot tell a difference from chance\n"
            f"hint: --repeats {MIN_REPEATS} or more; 5 see a few percent"
        )


def check_rows(expected: Expectations, results: Sequence[PairResult]) -> list[GateRow]:
    """Hold rate, speedup and memory of every arm against the stored runs."""
    kept = [result for result in results if result.status == "ok"]
    checks = [check for result in kept for check in _checks(expected, result)]
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(checks))
    return [_hold(*check, confidence) for check in checks]


Check = tuple[GateRow, list[float], list[float]]


def _checks(expected: Expectations, result: PairResult) -> Iterator[Check]:
    stored = expected.pairs[result.target]
    first, old_first = result.arm(result.baseline), stored.arms[result.baseline]
    for arm in result.measured:
        old = stored.arms[arm.name]
        _require_same_data(result, arm, old)
        yield _check(result, arm, "rate", old.rates, arm.rates)
        if arm.name != result.baseline:
            was, now = _ratios(old.rates, old_first.rates), _ratios(arm.rates, first.rates)
            yield _check(result, arm, "speedup", was, now)
        if arm.peak_bytes and old.peak_bytes:
            sizes = [[float(each) for each in held] for held in (old.peak_bytes, arm.peak_bytes)]
            yield _check(result, arm, "memory", sizes[0], sizes[1])


def _check(
    result: PairResult, arm: ArmResult, what: Any, old: list[float], new: list[float]
) -> Check:
    row = GateRow(
        target=result.target,
        arm=arm.name,
        what=what,
        stored=sum(old) / len(old),
        found=sum(new) / len(new),
        ratio=Range(value=1.0, low=1.0, high=1.0),
        is_worse=False,
        floor=1 / (1 + MARGIN),
    )
    return row, old, new


def _hold(row: GateRow, old: list[float], new: list[float], confidence: float) -> GateRow:
    """Call a figure worse only where all of its interval lies beyond the margin."""
    standings = compare_groups(
        [Group("stored", tuple(old)), Group("new", tuple(new))],
        baseline="stored",
        lower_is_better=row.what == "memory",
        margin=MARGIN,
        confidence=confidence,
    )
    ratio = Range.of(standings.of("new").speedup)
    assert ratio is not None, "both sides were repeated"
    return row.model_copy(update={"ratio": ratio, "is_worse": ratio.high < 1 / (1 + MARGIN)})


def _ratios(rates: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Return the ratio of each repeat: what drifted meanwhile met both sides of a round."""
    return [rate / other for rate, other in zip(rates, baseline, strict=False)]


def _require_same_data(result: PairResult, arm: ArmResult, old: StoredArm) -> None:
    now = arm.fingerprints
    if now is not None and now.data != old.fingerprints.data:
        raise ConfigError(
            f"cannot be compared with what is stored: {result.target}, {arm.name} trained on other"
            f" data ({now.data}, not {old.fingerprints.data})"
        )


def _stored(result: PairResult, pair: Pair, env: Env) -> StoredPair:
    arms = {}
    for arm in result.measured:
        assert arm.fingerprints is not None, "a run that was measured has a result"
        arms[arm.name] = StoredArm(
            config=config_of(pair, arm.name),
            rates=arm.rates,
            peak_bytes=arm.peak_bytes,
            fingerprints=arm.fingerprints,
        )
    return StoredPair(
        saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        version=__version__,
        torch=env.torch,
        metric=result.metric,
        baseline=result.baseline,
        steps=result.steps,
        arms=arms,
    )


def config_of(pair: Pair, arm: str) -> dict[str, Any]:
    job = next(planned.job for planned in pair.arms if planned.name == arm)
    return flatten(job.config.model_dump(mode="json", exclude={"name"}))


def file_in(path: Path, env: Env) -> Path:
    if path.suffix == ".json":
        return path
    return path / f"expectations_{key_of(env)}.json"


def key_of(env: Env) -> str:
    """Return `8x_nvidia_h200`, `nvidia_h200`, or `cpu_2_NAME` with its cores."""
    if not env.gpus:
        return f"cpu_{env.cores}_{_slug(env.cpu)}"
    count = f"{len(env.gpus)}x_" if len(env.gpus) > 1 else ""
    return f"{count}{_slug(env.gpus[0].name)}"


def hardware_of(env: Env) -> dict[str, str]:
    """Return what must be equal for figures to compare. The host's name is not part of it: a CI
    job runs on whichever of equal machines is free. These texts are stored and compared, so they
    keep their form."""
    gpus = [f"{gpu.name} ({gpu.memory_bytes >> 20} MiB)" for gpu in env.gpus]
    links = [f"{link.a}-{link.b} {link.kind} x{link.nvlinks}" for link in env.links]
    return {
        "cpu": env.cpu,
        "cores": str(env.cores),
        "gpus": ", ".join(gpus) or "none",
        "links": ", ".join(links) or "none",
        "driver": env.driver or "none",
    }


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
