"""What passes between stages: frozen records, each a JSON file with a schema number.

A stage reads records and returns a record; `RunDir` (rundir.py) says where each one lies.
Nothing here imports torch, so reports and comparisons run anywhere.
"""

from paceline.records.base import Part, Record
from paceline.records.decided import (
    Attention,
    Backend,
    BatchSplit,
    Choice,
    CompileScope,
    Crew,
    Device,
    Exchange,
    ExchangeBy,
    Finding,
    Fp8Plan,
    Kernels,
    LaunchPlan,
    Limits,
    Matmul,
    MemoryPlan,
    ModelSize,
    PipelinePlan,
    Plan,
    Precision,
    RankPlace,
    Recompute,
    StagePlan,
    StateBytes,
)
from paceline.records.found import Env, Git, Gpu, Link
from paceline.records.kept import (
    BestMetric,
    DataPosition,
    FileSum,
    Kept,
    Manifest,
    StreamPlaces,
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
    IdleShares,
    Overlap,
    PipelineFacts,
    PipelineRank,
    PipelineStage,
    Proof,
    RankEnd,
    RankError,
    RankMemory,
    RankVerdict,
    Result,
    Stability,
    StepSeconds,
    Unwritten,
    Window,
    list_unwritten,
)
from paceline.records.scheduled import (
    NeededMicrobatches,
    ScheduleComparison,
    ScheduleRow,
    Sourced,
)
