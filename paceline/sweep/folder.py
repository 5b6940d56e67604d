"""The directory of a sweep: where its files lie."""

from dataclasses import dataclass
from pathlib import Path

from paceline.records.rundir import RunDir, slug


@dataclass(frozen=True)
class SweepDir:
    root: Path

    @property
    def record(self) -> Path:
        return self.root / "sweep.json"

    @property
    def manifest(self) -> Path:
        return self.root / "run_manifest.tsv"

    @property
    def per_run(self) -> Path:
        return self.root / "per_run_metrics.csv"

    @property
    def points(self) -> Path:
        return self.root / "timing_points.csv"

    @property
    def groups(self) -> Path:
        return self.root / "group_summary.csv"

    @property
    def ranked(self) -> Path:
        return self.root / "ranked_groups.csv"

    @property
    def best(self) -> Path:
        return self.root / "best_config.json"

    @property
    def best_overrides(self) -> Path:
        return self.root / "best_overrides.txt"

    @property
    def skipped(self) -> Path:
        return self.root / "skipped_runs.tsv"

    @property
    def summary(self) -> Path:
        return self.root / "summary.md"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def unused_run(self, cell: str, repeat: int) -> Path:
        """Where this repeat runs; with a counter behind it where one was run before."""
        stem = f"{slug(cell)}_r{repeat}"
        tries = (self.runs / (f"{stem}-{n}" if n else stem) for n in range(10_000))
        return next(path for path in tries if not path.exists())

    def run(self, row: dict[str, str]) -> RunDir:
        """The run directory of a row of the manifest, wherever the sweep has been moved to."""
        return RunDir(self.root / row["run_dir"])
