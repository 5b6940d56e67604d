"""Carries out the action of a broken rule, by files that a live run polls anyway."""

from contextlib import suppress

from paceline.config.health import Action, RulesConfig
from paceline.records.files import write_atomic
from paceline.records.findings import RunFinding
from paceline.records.rundir import RunDir


def action_for(rules: RulesConfig, kind: str) -> Action:
    """Return the action for findings of a kind; a verdict, which has no rule, is only reported."""
    return rules.actions().get(kind, "warn")


def act_on(run: RunDir, finding: RunFinding, action: Action) -> str:
    """Carry out a rule's action, apart from reporting it; return what was done, empty for nothing.
    It never waits, and a full disk does not end the run."""
    if action in ("off", "warn"):
        return ""
    with suppress(OSError):
        run.dump_request.parent.mkdir(exist_ok=True)
        if action == "checkpoint":
            run.checkpoint_request.touch()
            return "asked for a checkpoint"
        run.dump_request.touch()  # also before a halt: the stacks say why
        if action == "dump":
            return "asked for the stacks of all ranks"
        halt(run, finding.kind)
        return "asked all ranks to stop (.HALT)"
    return f"{action} could not be asked for: the disk takes no file"


def halt(run: RunDir, kind: str) -> None:
    """Ask all ranks to write a checkpoint and stop, and leave the reason beside it."""
    write_atomic(run.anomaly, f"{kind}\n")
    write_atomic(run.halt, f"halt: {kind}\n")
