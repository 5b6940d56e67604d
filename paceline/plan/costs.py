"""What a pipeline's blocks cost, counted from the model's parameters (FLOPs, activations, state),
and how fast a device multiplies and a link carries: measured by `paceline check`, else stated, else
assumed, each with its reason.

For one sample of N positions (tokens, where a workload has them), a matrix of R x C weights:

    forward             2 R C N
    input backward      2 R C N
    weight backward     2 R C N, nothing where it is frozen
    activations kept    (R + C) N numbers of the compute type: what goes in, what comes out
    state               weights, gradients and optimizer: 16 bytes per weight with AdamW on fp32

What the workload counts beyond its matrices (attention's two products) is shared by all blocks; its
backward is twice its forward, and it has no weights. Embeddings are lookups and count nothing; what
is between blocks counts with the one before it, so the head does with the last.
train.activation_checkpointing=full adds a forward to the input backward and keeps a block's input
only; selective keeps what comes out of matrices.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from paceline.config.schema import RunConfig
from paceline.machine.datasheets import choose_peak, expected_link_gb_per_s, find_sheet
from paceline.machine.measures import load_link, load_matmul_tflops
from paceline.records import Crew, Env, Sourced
from paceline.records.words import size
from paceline.strategies.base import Share
from paceline.strategies.pipeline.strategy import PIPELINE
from paceline.strategies.shape import ModelShape, ParameterShape
from paceline.workloads.base import Workload

# GB/s one way. Two gloo ranks on one machine: 0.7 to 2.3 in benchmarks/results/check_bandwidth.txt;
# PCIe 4.0 x16: 32 by its standard, less what its packets take; between machines: 100 Gbit/s.
PCIE_SHARE = 0.8
CPU_LINK_GB_PER_S, GPU_LINK_GB_PER_S, NETWORK_GB_PER_S = 2.0, 25.0, 12.5


@dataclass(frozen=True)
class CountedBlock:
    """What one sample costs in a block; `state_bytes` does not depend on samples. `sent_bytes`:
    what is sent to the next block."""

    forward_flops: float
    input_flops: float
    weight_flops: float
    activation_bytes: float
    sent_bytes: float
    state_bytes: float

    @property
    def flops(self) -> float:
        return self.forward_flops + self.input_flops + self.weight_flops


@dataclass(frozen=True)
class Positions:
    """How many positions a sample has, and FLOPs per sample that each block has besides its
    matrices."""

    number: float
    more_flops: float
    because: str


def count_blocks(
    workload: Workload, config: RunConfig, model: ModelShape, share: Share
) -> tuple[list[CountedBlock], str]:
    """Return the cost of each block, and in words what was counted."""
    positions = count_positions(workload, config, model)
    return [
        _count(number, config, model, share, positions) for number in range(model.num_blocks)
    ], positions.because


def _count(
    number: int, config: RunConfig, model: ModelShape, share: Share, positions: Positions
) -> CountedBlock:
    recompute = config.train.activation_checkpointing
    # A table that is tied to the head multiplies there only.
    here = [p for p in model.parameters if p.is_matrix and p.places[-1] == number]
    passing = positions.number * model.positions_of(number)
    forward = 2 * passing * sum(p.numel for p in here) + positions.more_flops / 3
    again = forward if recompute == "full" else 0.0
    trained = sum(p.numel for p in here if p.is_trainable)
    width = block_width([p for p in model.parameters if p.unit == number])
    kept = sum(_kept(p, p.unit == number, recompute) for p in here)
    kept += width if recompute == "full" else 0
    held = model.of_blocks([range(number, number + 1)])
    return CountedBlock(
        forward_flops=forward,
        input_flops=forward + positions.more_flops / 3 + again,
        weight_flops=2 * passing * trained,
        activation_bytes=passing * share.compute_bytes * kept,
        sent_bytes=passing * share.compute_bytes * width,
        state_bytes=PIPELINE.estimate(held, config, share).total,
    )


def count_positions(workload: Workload, config: RunConfig, model: ModelShape) -> Positions:
    """Return tokens where samples have them; else what the workload's own count of FLOPs comes
    to."""
    flops = workload.flops(config)
    matrices = sum(model.block_costs)
    if workload.unit == "tokens":
        known = workload.units_per_sample(config)
        tokens: int = getattr(config.data, "seq_len", 1) if known is None else known
        more = max(0.0, (flops or 0.0) - 6 * matrices * tokens) / max(1, model.num_blocks)
        return Positions(tokens, more, f"FLOPs of its matrices for {tokens} tokens per sample")
    if flops and matrices:
        because = "the workload's own FLOPs, shared out to blocks by their matrices"
        return Positions(flops / (6 * matrices), 0.0, because)
    because = "FLOPs of its matrices for one position per sample: the workload does not say more"
    return Positions(1.0, 0.0, because)


def block_width(parameters: Sequence[ParameterShape]) -> int:
    """Return the numbers per position that are sent from a block to the next: the length that
    most of its vectors have (norms, biases), else the rows of its last matrix."""
    vectors = Counter(p.shape[0] for p in parameters if len(p.shape) == 1)
    if vectors:
        return vectors.most_common(1)[0][0]
    matrices = [p for p in parameters if len(p.shape) > 1]
    return matrices[-1].shape[0] if matrices else 0


def _kept(matrix: ParameterShape, is_inside: bool, recompute: str) -> int:
    """Return the numbers per position that are kept for backward; all, where the matrix is
    outside blocks."""
    rows, columns = matrix.shape[0], prod(matrix.shape[1:])
    if not is_inside or recompute == "none":
        return rows + columns
    return rows if recompute == "selective" else 0


@dataclass(frozen=True)
class Speed:
    """FLOP/s of a device, or bytes/s of a link."""

    per_s: float
    source: Sourced


def choose_rate(
    env: Env, crew: Crew, arithmetic: str, threads: int, asked: float | str = "auto"
) -> Speed:
    """Return the FLOP/s of one rank that multiplies in `arithmetic`."""
    device = crew.device.value
    measured = load_matmul_tflops(env, device, arithmetic, threads)
    if measured is not None:
        because = (
            f"{measured:.3g} TFLOP/s in {arithmetic}, measured here by `paceline check` on large"
            " matrices; layers reach less"
        )
        return Speed(measured * 1e12, Sourced(what="rate", kind="measured", because=because))
    peak = choose_peak(asked, env, device, arithmetic)
    if peak.value is not None:
        because = f"{peak.because}; layers reach about half"
        return Speed(peak.value, Sourced(what="rate", kind="assumed", because=because))
    because = (
        "1 TFLOP/s, for the rate of this device is not known: only relative times mean something;"
        " `paceline check` measures it"
    )
    return Speed(1e12, Sourced(what="rate", kind="assumed", because=because))


def choose_link(env: Env, crew: Crew) -> Speed:
    """Return the bytes/s from rank to rank, one way."""
    device = crew.device.value
    measured = load_link(env, device, crew.num_nodes)
    if measured is not None:
        because = (
            f"{measured.gb_per_s:.3g} GB/s, the slowest link that `paceline check` measured here,"
            f" with {size(measured.num_bytes)}"
        )
        return _link(measured.gb_per_s, "measured", because)
    if crew.num_nodes > 1:
        because = f"{NETWORK_GB_PER_S:g} GB/s between machines (100 Gbit/s)"
        return _link(NETWORK_GB_PER_S, "assumed", because)
    if device == "cpu":
        because = f"{CPU_LINK_GB_PER_S:g} GB/s, about what gloo carries inside a machine"
        return _link(CPU_LINK_GB_PER_S, "assumed", because)
    stated = [
        expected_link_gb_per_s(link.kind, link.nvlinks, env.gpus[link.a].name)
        for link in env.links
        if link.a < len(env.gpus)
    ]
    known = [rate for rate in stated if rate is not None]
    if known and len(known) == len(stated):
        because = f"{min(known):g} GB/s, the NVLinks that the driver reports by their data sheet"
        return _link(min(known), "assumed", because)
    sheet = find_sheet(env.gpus[0].name) if env.gpus else None
    if sheet is not None and sheet.pcie_gb_per_s is not None:
        rate = PCIE_SHARE * sheet.pcie_gb_per_s
        because = f"{rate:.3g} GB/s between GPUs (PCIe, {sheet.pcie_gb_per_s:g} by its data sheet)"
        return _link(rate, "assumed", because)
    because = f"{GPU_LINK_GB_PER_S:g} GB/s between GPUs (PCIe 4.0 x16)"
    return _link(GPU_LINK_GB_PER_S, "assumed", because)


def _link(gb_per_s: float, kind: str, because: str) -> Speed:
    source = Sourced.model_validate({"what": "link", "kind": kind, "because": because})
    return Speed(gb_per_s * 1e9, source)
