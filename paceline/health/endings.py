"""Findings about how a run ended: the failure that the launcher has judged, and what the disk did
not accept."""

from collections.abc import Iterator

from paceline.errors import Outcome
from paceline.health.evidence import Evidence
from paceline.records import Failure, Result
from paceline.records.findings import RunFinding, finite

NEWLINE = "\n"
HINT = "\nhint: "
KINDS = {
    Outcome.NAN: "nan_loss",
    Outcome.STALL: "hang",
    Outcome.CRASHED: "crash",
    Outcome.OUT_OF_RESOURCES: "out_of_memory",
    Outcome.CHECKPOINT_NOT_WRITTEN: "checkpoint_not_written",
    Outcome.REFUSED_DATA: "bad_data",
}


def find_ending(evidence: Evidence) -> Iterator[RunFinding]:
    """Yield why a run did not end well, and which of its files the disk did not accept."""
    result = evidence.result
    if result is None:
        return
    if result.failure is not None:
        yield _failure(result, result.failure)
    elif result.outcome is Outcome.NAN:
        yield _nan(evidence, result)
    if result.unwritten:
        first = result.unwritten[0]
        yield RunFinding(
            kind="full_disk",
            severity="warning",
            words=f"the disk did not take all of the run's files: {first}",
            evidence=finite({"files": [item.file for item in result.unwritten]}),
            to_try="free space there; the run itself went on",
        )


def _failure(result: Result, failure: Failure) -> RunFinding:
    kind = KINDS.get(result.outcome, str(result.outcome))
    text = failure.message.lower()
    if kind == "out_of_memory" and ("no space" in text or "cannot be written" in text):
        kind = "full_disk"
    what, _, hint = failure.message.partition(HINT)
    return RunFinding(
        kind=kind,
        rank=failure.rank,
        step=failure.step,
        severity="error",
        words=f"rank {failure.rank} on {failure.host} ended the run in {failure.phase} of step"
        f" {failure.step}: {what.partition(NEWLINE)[0]}",
        evidence=finite(
            {"outcome": str(result.outcome), "phase": failure.phase, "log": failure.log}
        ),
        to_try=hint or (f"read {failure.log}" if failure.log else ""),
    )


def _nan(evidence: Evidence, result: Result) -> RunFinding:
    """Name the rank whose loss it was, if it was one rank's own: in a pipeline the last stage sees
    all losses, whichever rank spoilt them."""
    is_pipeline = evidence.plan is not None and evidence.plan.pipeline is not None
    ranks, ids = result.bad_ranks, ", ".join(map(str, result.bad_sample_ids[:8]))
    rank = ranks[0] if len(ranks) == 1 and not is_pipeline else None
    whose = f"; it was rank {rank}'s loss" if rank is not None and evidence.num_ranks > 1 else ""
    return RunFinding(
        kind="nan_loss",
        rank=rank,
        step=result.bad_step,
        severity="error",
        words=f"the run ended in step {result.bad_step}, whose loss or gradient was not finite"
        + whose
        + (f"; the samples of it were {ids}" if ids else ""),
        evidence=finite(
            {
                "bad_step": result.bad_step,
                "bad_ranks": ranks,
                "bad_sample_ids": result.bad_sample_ids[:64],
            }
        ),
        to_try="look at these samples; a lower optim.lr; train.max_skips lets some steps pass",
    )
