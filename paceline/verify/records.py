"""The result of `paceline verify`: one proof per strategy, verify.json."""

from pydantic import Field

from paceline.records import Part, Record


class Check(Part):
    """One property: what was measured and what would have been allowed."""

    name: str
    ok: bool
    measured: str
    allowed: str


class StrategyProof(Part):
    strategy: str
    checks: list[Check] = []
    skipped: str = Field("", description="Why it was not tried here.")
    failure: str = Field("", description="Why its ranks did not finish.")

    @property
    def ok(self) -> bool:
        return not self.failure and all(check.ok for check in self.checks)


class VerifyReport(Record):
    run_dir: str
    world_size: int
    device: str
    exit_code: int
    proofs: list[StrategyProof]
    elapsed_s: float
    job: str = Field("", description="The user's job that was proven; empty: a model of ours.")
    notes: list[str] = Field([], description="What was noticed about the job.")


class TrialHeld(Record):
    """Bytes that one rank really held: weights and optimizer after a step, gradients before it."""

    parameters: int
    gradients: int
    optimizer: int
    restored: bool = Field(description="Another engine took this one's state, bit for bit.")
