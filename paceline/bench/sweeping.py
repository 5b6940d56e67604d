"""The bench's pairs through the sweep's runner: interleaved, resumed by fingerprints, recorded."""

from pathlib import Path

from paceline.bench.runner import PairRunner, Ran
from paceline.launch.signals import logged_signals
from paceline.records.rundir import RunLock
from paceline.records.swept import SweepRecord
from paceline.sweep.flow import open_folder, report_sweep
from paceline.sweep.folder import rows_of
from paceline.sweep.runner import SweepRunner, SweepTalk


def through_sweeps(talk: SweepTalk) -> PairRunner:
    """A runner of pairs that makes each a sweep directory."""

    def run_pair(record: SweepRecord, root: Path) -> Ran:
        folder = open_folder(record, root.name, root)
        with RunLock(folder.root), logged_signals() as signals:
            record.save(folder.record)
            runner = SweepRunner(record, folder, talk, signals)
            try:
                runner.run_phase(record.phases[0])
            finally:
                report_sweep(runner)
            runner.is_stopped()
        return Ran(rows_of(record.phases[0], runner.rows), runner.stopped_by)

    return run_pair
