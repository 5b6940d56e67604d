"""The bench's pairs through the sweep's runner: interleaved, resumed by fingerprints, recorded."""

from pathlib import Path

from paceline.bench.runner import PairRunner, Ran
from paceline.records.swept import SweepRecord
from paceline.rundir import RunLock
from paceline.sweep.flow import open_folder
from paceline.sweep.judge import judge_sweep
from paceline.sweep.outputs import write_outputs
from paceline.sweep.runner import RunOptions, SweepRunner, SweepTalk


def through_sweeps(talk: SweepTalk) -> PairRunner:
    """A runner of pairs that makes each a sweep directory."""

    def run_pair(record: SweepRecord, root: Path) -> Ran:
        folder = open_folder(record, root.name, root)
        with RunLock(folder.root):
            record.save(folder.record)
            runner = SweepRunner(record, folder, talk, RunOptions())
            try:
                runner.run_phase(record.phases[0])
            finally:
                judgement = judge_sweep(record, folder, runner.rows)
                write_outputs(folder, record, runner.rows, judgement)
        return Ran(runner.rows, runner.stopped_by)

    return run_pair
