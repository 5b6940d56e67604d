"""What passes between stages: frozen records, each a JSON file with a schema number.

A stage reads records and returns a record; `RunDir` (rundir.py) says where each one lies.
Nothing here imports torch, so reports and comparisons run anywhere.
"""

from paceline.records.base import Part, Record
from paceline.records.decided import (
    BatchSplit,
    Choice,
    Crew,
    Exchange,
    Finding,
    LaunchPlan,
    Limits,
    ModelSize,
    Plan,
    RankPlace,
    StateBytes,
)
from paceline.records.found import Env, Git, Gpu, Link
from paceline.records.kept import (
    BestMetric,
    DataPosition,
    FileSum,
    Kept,
    Manifest,
    TensorEntry,
    TensorRows,
)
from paceline.records.recorded import (
    Attempt,
    AttemptSummary,
    Audit,
    CheckpointFacts,
    Failure,
    Fingerprints,
    Proof,
    RankEnd,
    RankError,
    RankMemory,
    RankVerdict,
    Result,
    StepSeconds,
    Window,
)

__all__ = [
    "Attempt",
    "AttemptSummary",
    "Audit",
    "BatchSplit",
    "BestMetric",
    "CheckpointFacts",
    "Choice",
    "Crew",
    "DataPosition",
    "Env",
    "Exchange",
    "Failure",
    "FileSum",
    "Finding",
    "Fingerprints",
    "Git",
    "Gpu",
    "Kept",
    "LaunchPlan",
    "Limits",
    "Link",
    "Manifest",
    "ModelSize",
    "Part",
    "Plan",
    "Proof",
    "RankEnd",
    "RankError",
    "RankMemory",
    "RankPlace",
    "RankVerdict",
    "Record",
    "Result",
    "StateBytes",
    "StepSeconds",
    "TensorEntry",
    "TensorRows",
    "Window",
]
