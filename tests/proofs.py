"""`paceline verify` in this process, and what a proven strategy looks like."""

from pathlib import Path

from paceline.verify.flow import run_verify
from paceline.verify.records import VerifyReport
from tests.harness import warm_fork_server

CPU = ["launch.device=cpu"]


def verify(names: list[str], overrides: list[str], folder: Path) -> VerifyReport:
    warm_fork_server()
    return run_verify(names, [*CPU, *overrides], folder, lambda text: None)


def assert_proven(report: VerifyReport, *names: str) -> None:
    assert [proof.strategy for proof in report.proofs] == list(names)
    for proof in report.proofs:
        assert not proof.failure and not proof.skipped, proof
        assert len(proof.checks) == 10
        assert all(check.ok for check in proof.checks), proof
    assert report.exit_code == 0
