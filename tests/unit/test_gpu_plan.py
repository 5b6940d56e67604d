"""What the plan decides of kernels, fp8, memory and exchange, and the reason that it gives."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.job import load_job
from paceline.plan.memory import Kept, Saved, choose_blocks, measure_saved, needed_bytes
from paceline.plan.planner import make_plan
from paceline.records import Env, Plan
from paceline.strategies.base import EngineParts
from paceline.strategies.optim import by_kernel
from paceline.workloads.base import Workload
from paceline.workloads.given import give
from paceline.workloads.lm.workload import LanguageModel
from tests.machines import box, machine, plan

H200, CPU = machine(1), machine()
A100 = machine(1, capability="8.0", name="NVIDIA A100-SXM4-80GB")
FP8 = "precision.mode=fp8"


def told(made: Plan) -> str:
    return "\n".join(str(finding) for finding in made.findings)


@pytest.mark.parametrize(
    ("overrides", "env", "value", "because"),
    [
        ([], H200, "triton", "RoPE, SwiGLU and weight gradients and AdamW: faster and equal"),
        ([], CPU, "torch", "there is no GPU"),
        ([], A100, "torch", "not measured on this GPU"),
        (["precision.mode=fp32"], H200, "torch", "not measured in fp32"),
        (["train.kernels=torch"], H200, "torch", "as asked"),
    ],
)
def test_kernels_are_ours_where_that_was_measured(
    overrides: list[str], env: Env, value: str, because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.plan.kernels.find_spec", lambda name: name)
    made = plan(*overrides, machine=env)
    assert made.kernels.value == value and because in made.kernels.because
    assert not made.problems()


@pytest.mark.parametrize(
    ("beside", "has_adamw"),
    [
        (["strategy.name=zero3"], True),
        (["strategy.name=zero3", "strategy.offload=true"], False),
        (["strategy.name=ddp", "strategy.offload=true"], True),  # it has no such key
        (["strategy.name=deepspeed"], True),  # which calls our optimizer
        (["strategy.name=deepspeed", "strategy.offload=true"], False),
        (["optim.fused=off"], False),
        (["optim.name=lion"], False),
    ],
)
def test_a_kernel_is_claimed_where_it_runs(
    beside: list[str], has_adamw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.plan.kernels.find_spec", lambda name: name)
    made = plan(*beside, machine=box(4))
    assert made.kernels.value == "triton"
    assert ("AdamW" in made.kernels.because) == has_adamw


def test_updates_on_the_host_are_by_torch() -> None:
    """DeepSpeed is given the optimizer while the weights are on the GPU, and moves them then."""
    asked = ["strategy.name=deepspeed", "strategy.stage=2", "train.kernels=triton"]
    model = Mock(parameters=lambda: iter([Mock(is_cuda=True)]))
    for offload, expected in (("true", False), ("false", True)):
        job = load_job("lm_tiny", [*asked, f"strategy.offload={offload}"])
        made = make_plan(job, box(4))
        parts = EngineParts(job.config, made, job.workload, torch.device("cuda"))
        assert by_kernel(parts, model) == expected


def test_the_chip_that_was_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.plan.kernels.find_spec", lambda name: name)
    assert plan(machine=H200).kernels.because.endswith("faster and equal on an H200")
    other = plan(machine=box(1)).kernels
    assert other.value == "triton" and "H100 80GB HBM3 was not measured" in other.because


def test_without_triton_it_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.plan.kernels.find_spec", lambda name: None)
    assert plan(machine=H200).kernels.because == "triton is not installed"
    assert "pip install triton" in told(plan("train.kernels=triton", machine=H200))


def test_fp8_takes_large_layers_and_says_why_others_stay() -> None:
    made = plan(FP8, source="lm_1b", machine=H200)
    assert made.fp8 is not None and len(made.fp8.layers) == 4 * 24 and not made.problems()
    assert "outside of the blocks" in made.fp8.kept["tail.head.weight"]
    # Measured: 1.31 by our kernel, 1.18 by torchao's (benchmarks/results/gpu_fp8_h200.txt).
    assert 1.26 < made.fp8.gain < 1.36
    without = plan(FP8, "train.kernels=torch", source="lm_1b", machine=H200)
    assert without.fp8 is not None and 1.13 < without.fp8.gain < 1.23
    odd = plan(FP8, "model.ffn_dim=5500", source="lm_1b", machine=H200)
    assert odd.fp8 is not None
    assert "multiples of 16" in odd.fp8.kept["blocks.0.ffn.down.weight"]


class Turned(nn.Module):
    """A layer as transformers' Conv1D: a matrix of its own, turned, and no nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))


class Scaled(nn.Linear):
    """A layer whose forward torchao's would take the place of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Mixed(Workload):
    def build_model(self, config: Any) -> nn.Module:
        layers = [nn.TransformerEncoderLayer(64, 4, 128), Turned(), Scaled(64, 64)]
        return nn.Sequential(nn.ModuleList(layers), nn.Linear(64, 2))

    def build_data(self, config: Any, split: str) -> Any:
        return [torch.zeros(64)]

    def loss(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        return model(batch).sum(), len(batch)


def test_fp8_names_only_layers_that_torchao_can_replace() -> None:
    """`in_proj_weight` has no module of its own, and nobody calls `out_proj`."""
    job = load_job(give(Mixed), [FP8, "precision.fp8_layers=all"])
    made = make_plan(job, CPU).fp8
    assert made is not None and made.layers == ["0.0.linear1", "0.0.linear2"]
    apart = ["0.0.self_attn.in_proj_weight", "0.0.self_attn.out_proj.weight"]
    for name in (*apart, "0.1.weight", "0.2.weight"):
        assert "no nn.Linear that is called" in made.kept[name]


def test_a_model_without_a_layer_for_fp8_is_offered_what_helps() -> None:
    class Plain(Mixed):
        def build_model(self, config: Any) -> nn.Module:
            return nn.Sequential(nn.ModuleList([Turned()]), nn.Linear(64, 2))

    for asked, offered in (("auto", True), ("all", False)):
        made = make_plan(load_job(give(Plain), [FP8, f"precision.fp8_layers={asked}"]), CPU)
        (problem,) = [p for p in made.problems() if p.where == "precision.mode"]
        assert ("fp8_layers=all" in problem.hint) == offered


def test_frozen_layers_stay_in_bf16_with_a_reason() -> None:
    frozen = "optim.groups=[{match: 'blocks.[01].*', frozen: true}]"
    made = plan(FP8, "precision.fp8_layers=all", frozen, machine=H200).fp8
    assert made is not None and len(made.layers) == 4 * 2
    assert "frozen" in made.kept["blocks.0.ffn.down.weight"]


@pytest.mark.slow  # imports transformers
def test_a_model_without_our_kernels_gains_what_torchao_gains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton updates its weights, but its layers are torchao's."""
    monkeypatch.setattr("paceline.plan.kernels.find_spec", lambda name: name)
    asked = [FP8, "precision.fp8_layers=all"]
    ours = plan(*asked, source="mae_tiny", machine=H200)
    theirs = plan(*asked, "train.kernels=torch", source="mae_tiny", machine=H200)
    assert (ours.kernels.value, theirs.kernels.value) == ("triton", "torch")
    assert ours.fp8 is not None and theirs.fp8 is not None
    assert ours.fp8.layers and ours.fp8.gain == theirs.fp8.gain


def test_gradients_in_fp8_sum_over_rows_in_16s() -> None:
    """The product of a weight's gradient sums over tokens; rowwise_gw_hp takes it in bf16, and our
    kernel fills rows up."""
    ours = [FP8, "train.micro_batch_size=8", "data.seq_len=2047", "precision.fp8_layers=all"]
    assert not plan(*ours, source="lm_1b", machine=H200).problems()
    odd = [*ours, "train.kernels=torch"]
    (problem,) = plan(*odd, source="lm_1b", machine=H200).problems()
    assert "16376 tokens in a microbatch" in problem.what and "16" in problem.hint
    high = "precision.fp8_recipe=rowwise_gw_hp"
    assert not plan(*odd, high, source="lm_1b", machine=H200).problems()
    assert not plan(*odd, source="lm_1b", machine=CPU).problems()


ON = "precision.fp8_all_gather=on"


def gathers(*words: str, num_gpus: int = 8) -> tuple[bool, str]:
    """Whether weights travel in fp8, and what the plan says of it."""
    asked = ["strategy.name=zero3", FP8, *words]
    made = plan(*asked, source="lm_1b", machine=box(num_gpus))
    assert made.fp8 is not None and not made.problems()
    said = [f.what for f in made.findings if f.where == "precision.fp8_all_gather"]
    assert len(said) <= 1 and (said or made.world_size == 1)
    return made.fp8.gathers_fp8, made.fp8.gathers_because


def test_weights_travel_in_fp8_where_that_is_asked() -> None:
    """It is no default: nobody has measured it between GPUs."""
    for num_gpus in (1, 2, 8):
        is_low, because = gathers(num_gpus=num_gpus)
        assert not is_low and "not measured" in because
        assert gathers(ON, num_gpus=num_gpus) == (True, "as asked")
    assert gathers("precision.fp8_all_gather=off") == (False, "as asked")
    assert gathers("strategy.name=zero3_hybrid", "strategy.shard_size=2", ON)[0]


@pytest.mark.parametrize(
    ("words", "num_gpus", "why"),
    [
        ([], 3, "3 ranks cannot share the 2048 rows of blocks.0.attention.out.weight"),
        (["strategy.offload=true"], 8, "lie on the host"),
        (["precision.fp8_recipe=rowwise"], 8, "each row has a scale of its own"),
    ],
)
def test_weights_that_cannot_travel_in_fp8_do_not(
    words: list[str], num_gpus: int, why: str
) -> None:
    """torchao sends pieces as they are: uneven ones end ranks, or hang them."""
    found, because = gathers(*words, ON, num_gpus=num_gpus)
    assert not found and why in because


class Odd(Workload):
    """A block of two matrices that are one, or that have nothing beside them."""

    is_tied = False

    def build_model(self, config: Any) -> nn.Module:
        model, layers = nn.Module(), [nn.Linear(64, 64, bias=False) for _ in range(2)]
        if self.is_tied:
            layers[1].weight = layers[0].weight
            layers.append(nn.Linear(64, 1))
        model.blocks = nn.ModuleList([nn.Sequential(*layers)])
        return model

    def build_data(self, config: Any, split: Any) -> Any:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Any:
        raise NotImplementedError


class Tied(Odd):
    is_tied = True


@pytest.mark.parametrize(
    ("job", "why"), [(Tied, "belongs to several layers"), (Odd, "a block has nothing else")]
)
def test_models_that_torchao_would_change_gather_in_bf16(job: type[Odd], why: str) -> None:
    asked = ["strategy.name=zero3", FP8, "precision.fp8_layers=all", ON]
    made = make_plan(load_job(give(job), asked), box(4))
    assert made.fp8 is not None and made.fp8.layers and not made.fp8.gathers_fp8
    assert why in made.fp8.gathers_because


def test_fp8_gather_is_said_to_be_idle() -> None:
    idle = ["strategy.name=ddp", FP8, ON]
    made = plan(*idle, source="lm_1b", machine=box(8))
    (said,) = [f.what for f in made.findings if f.where == "precision.fp8_all_gather"]
    assert said == "is set but has no effect: ddp gathers no weights"


def test_padded_rows_count_where_texts_are_uneven() -> None:
    """1 x 1001 rows, however many of them have a loss."""
    uneven = ["data.source=stdlib", "data.pack=padded", "train.micro_batch_size=1"]
    uneven += ["train.kernels=torch", "precision.fp8_layers=all"]
    odd = plan(FP8, *uneven, "data.seq_len=1001", source="lm_1b", machine=H200)
    assert "1001 tokens in a microbatch" in odd.problems()[0].what
    assert not plan(FP8, *uneven, "data.seq_len=1008", source="lm_1b", machine=H200).problems()


def test_rows_that_nobody_knows_are_warned_of() -> None:
    job = load_job(give(Mixed), [FP8, "precision.fp8_layers=all"])
    made = make_plan(job, H200)
    assert "multiples of 16" in told(made) and not made.problems()
    assert "multiples of 16" not in told(make_plan(job, CPU))


@pytest.mark.slow  # imports transformers
def test_patches_are_counted_block_by_block() -> None:
    """The encoder of mae_tiny sees 4 of an image's 16 patches, and a class token: 8 x 5 rows are no
    multiple of 16; of 16 images any number is."""
    asked = [FP8, "precision.fp8_layers=all"]
    odd = plan(*asked, "train.micro_batch_size=8", source="mae_tiny", machine=H200)
    assert "40 rows in a microbatch" in odd.problems()[0].what
    assert not plan(*asked, "train.micro_batch_size=16", source="mae_tiny", machine=H200).problems()


@pytest.mark.slow  # imports transformers
def test_images_are_no_rows() -> None:
    """A layer's input has a row for each patch: of 64 images 64 x (49 + 1), not 64."""
    wide = [
        "model.hf_config.hidden_size=4096", "model.hf_config.intermediate_size=16384",
        "model.hf_config.image_size=224", "model.hf_config.patch_size=16",
    ]  # fmt: skip
    made = plan(FP8, *wide, "train.micro_batch_size=64", source="mae_tiny", machine=H200)
    assert made.fp8 is not None and made.fp8.layers and made.fp8.gain > 1.1


@pytest.mark.parametrize(
    ("overrides", "env", "says"),
    [
        ([FP8], H200, "no layer can take fp8"),
        ([FP8, "precision.fp8_layers=all"], H200, "fp8 is not worth it here"),
        ([FP8, "precision.fp8_layers=all"], A100, "needs compute capability 8.9, and this is 8.0"),
        ([FP8, "precision.fp8_layers=all"], CPU, "a CPU has no fp8: its rounding is computed"),
        ([FP8, "strategy.name=deepspeed"], H200, "cannot be used with deepspeed"),
        (["precision.fp8_recipe=rowwise"], H200, "has no effect: precision is bf16"),
        (["train.kernels=triton"], CPU, "the ranks are on CPU"),
        (["loss.chunk=64", "precision.mode=fp16"], H200, "before fp16's loss scale is known"),
        (["train.activation_offload=true"], CPU, "the ranks are on CPU already"),
        (["train.memory_budget=auto"], CPU, "there is no GPU whose memory"),
        (
            ["train.memory_budget=1", "train.activation_checkpointing=full"],
            CPU,
            "which also decides what is recomputed",
        ),
        (
            ["train.memory_budget=1", "train.activation_offload=true"],
            H200,
            "counts what blocks save as if it stayed on the GPU",
        ),
    ],
)
def test_what_cannot_be_or_is_idle_is_said(overrides: list[str], env: Env, says: str) -> None:
    assert says in told(plan(*overrides, machine=env))


OFFLOAD = ["train.activation_offload=true", "train.compile=default"]


@pytest.mark.parametrize(
    ("overrides", "env", "value", "because"),
    [
        (OFFLOAD, H200, "blocks", "train.activation_offload takes what each block saves"),
        (OFFLOAD, CPU, "model", "nothing is exchanged inside it"),
        (OFFLOAD[1:], H200, "model", "nothing is exchanged inside it"),
    ],
)
def test_what_is_offloaded_is_compiled_by_blocks(
    overrides: list[str], env: Env, value: str, because: str
) -> None:
    made = plan(*overrides, machine=env)
    assert (made.compile_scope.value, made.compile_scope.because) == (value, because)
    assert not made.problems()


def test_a_graph_of_the_whole_model_is_not_offloaded() -> None:
    whole = [*OFFLOAD, "train.compile_scope=model"]
    (problem,) = plan(*whole, machine=H200).problems()
    assert problem.where == "train.compile_scope" and "between the blocks" in problem.what
    assert not plan(*whole, machine=CPU).problems()
    assert not plan(*whole, "train.compile=off", machine=H200).problems()


def test_torchao_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.plan.fp8.find_spec", lambda name: None)
    monkeypatch.setattr("paceline.strategies.optimizers.find_spec", lambda name: None)
    made = plan(FP8, "optim.name=adamw8bit", source="lm_1b", machine=H200)
    assert [p.where for p in made.problems()] == ["precision.mode", "optim.name"]
    assert all("pip install 'paceline[fp8]'" in p.hint for p in made.problems())


def test_matrices_that_8_bits_do_not_serve_are_named() -> None:
    """A row is cut into blocks of 256: SwiGLU of lm_1b has rows of 5504, which is 21.5 of them."""
    asked = "optim.name=adamw8bit"
    large, small = plan(asked, source="lm_1b", machine=H200), plan(asked, "model.dim=64")
    (said,) = [f for f in large.findings if f.where == "optim.name"]
    in_down = 24 * 2048 * 5504 / large.model.num_trainable
    assert said.severity == "note" and f"{1 - in_down:.1%} of all" in said.what
    assert "not of blocks.0.ffn.down.weight, " in said.what
    (said,) = [f for f in small.findings if f.where == "optim.name"]
    assert said.severity == "warning" and "0.0% of all" in said.what


def test_large_logits_are_never_whole() -> None:
    large = ["model.vocab_size=128256", "data.seq_len=8192"]
    assert "4096 tokens at a time" in told(plan(*large, machine=H200))
    assert "loss.chunk" not in told(plan(*large, "loss.chunk=off", machine=H200))
    assert "loss.chunk" not in told(plan(machine=H200))


def test_logits_are_whole_where_auto_is_fp16() -> None:
    """A chunk's gradient cannot be scaled before it is taken, and the model computes them whole."""
    older = machine(1, capability="7.0", name="Tesla V100")
    large = plan("model.vocab_size=128256", "data.seq_len=8192", machine=older)
    assert large.precision.value == "fp16" and "loss.chunk" not in told(large)
    (problem,) = plan("loss.chunk=64", machine=older).problems()
    assert problem.where == "loss.chunk" and "fp16's loss scale" in problem.what


def test_a_budget_recomputes_as_few_blocks_as_it_can() -> None:
    """Blocks keep 10 whole, 1 + 4 selectively, 1 of all recomputed; 2 elsewhere."""
    saved = Saved([Kept(whole=10, products=4, inputs=1) for _ in range(4)], rest=2)
    everything = needed_bytes(saved, ["none"] * 4)
    assert choose_blocks(saved, everything) == ["none"] * 4
    # One selective block saves 5, and while it is computed again 10 are needed beside the rest.
    assert needed_bytes(saved, ["selective", "none", "none", "none"]) == 35 + 2 + 15
    assert choose_blocks(saved, 45) == ["selective"] * 3 + ["none"]
    assert choose_blocks(saved, 30) == ["full"] * 2 + ["selective"] * 2
    assert choose_blocks(saved, 0) == ["full"] * 4


@pytest.mark.slow
def test_a_budget_is_told_in_bytes_and_reaches_every_block() -> None:
    """By a fake forward pass of the real model."""
    made = plan("train.memory_budget=60", source="lm_1b", machine=H200)
    assert made.recompute.value == "mixed" and made.memory is not None
    kinds = [made.recompute_of(number) for number in range(24)]
    assert kinds == made.memory.blocks and set(kinds) == {"full", "selective"}
    # By hand, of one block of 32768 tokens: x, both norms' outputs, q, k, v, y, gate_up, hidden ...
    assert 60 < made.memory.without_bytes / 2**30 < 110
    used = made.memory.state_bytes + made.memory.activation_bytes
    assert used <= made.memory.budget.value == 60 * 10**9


class Again(Workload):
    """A block that is called by a name, and twice."""

    def build_model(self, config: Any) -> nn.Module:
        class Block(nn.Linear):
            def forward(self, *, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                return torch.tanh(super().forward(x))

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList([Block(8, 8)])

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x)
                for _ in range(2):
                    x = self.blocks[0](x=x)
                return x

        return Net()

    def build_data(self, config: Any, split: Any) -> Any:
        raise NotImplementedError

    def sketch_batch(self, config: Any) -> torch.Tensor:
        return torch.zeros(config.train.micro_batch_size, 8)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch).sum(), len(batch)


def test_a_block_keeps_the_input_of_every_call() -> None:
    job = load_job(give(Again), ["train.micro_batch_size=4"])
    saved = measure_saved(job.workload, job.config, "fp32")
    assert saved is not None
    # Each call: its input, 4 x 8 numbers of fp32; whole: the first one's input, and both results.
    assert saved.blocks[0].inputs == 2 * 4 * 8 * 4
    assert saved.blocks[0].whole == 3 * 4 * 8 * 4


class Weighted(LanguageModel):
    """Batches of its own, and a loss that looks at their values."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        tokens, weights = batch["tokens"], batch.get("weights")
        if weights is None:
            raise KeyError("weights")
        return super().loss(model, {"tokens": tokens[: int(weights.sum())]})


class Sketched(Weighted):
    def sketch_batch(self, config: Any) -> Any:
        return super().sketch_batch(config) | {"weights": torch.ones(3)}


@pytest.mark.parametrize(
    ("job", "why"), [(Weighted, "KeyError: 'weights'"), (Sketched, "_local_scalar_dense")]
)
def test_a_loss_of_no_sketch_is_named(job: type[LanguageModel], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_plan(load_job(give(job), ["train.memory_budget=1"]), CPU)
    said = str(refused.value)
    assert f"{job.__name__}.loss failed at test_gpu_plan.py:" in said
    assert why in said and "define sketch_batch" in said


def test_a_budget_is_a_number_of_gb() -> None:
    with pytest.raises(ConfigError, match="number > 0"):
        plan("train.memory_budget=1e300")
    little = "train.memory_budget=0.001"
    assert "activation_offload" in told(plan(little, machine=H200))
    assert "is not enough" in told(plan(little)) and "offload" not in told(plan(little))


@pytest.mark.parametrize(
    ("env", "value", "because"),
    [
        (box(4), "symmetric", "as asked"),
        (box(4, kind="pcie"), "collectives", "no NVLink between GPUs 0 and 1: pcie"),
        (machine(1), "collectives", "one rank"),
        (machine(), "collectives", "one rank"),
    ],
)
def test_symmetric_memory_needs_nvlink(env: Env, value: str, because: str) -> None:
    made = plan("strategy.exchange=symmetric", "strategy.name=zero3", machine=env)
    assert made.exchange_by.value == value and because in made.exchange_by.because
    assert ("symmetric was asked" in told(made)) == (value == "collectives")


def test_ranks_on_cpus_have_no_symmetric_memory() -> None:
    asked = ["strategy.exchange=symmetric", "strategy.name=zero3", "launch.nproc=2"]
    assert "the ranks are on CPU" in plan(*asked).exchange_by.because


@pytest.mark.parametrize("name", ["single", "ddp", "deepspeed"])
def test_an_exchange_that_nobody_reads_is_told_once(name: str) -> None:
    made = plan("strategy.exchange=fused", f"strategy.name={name}", "launch.nproc=1")
    (said,) = [f.what for f in made.findings if f.where == "strategy.exchange"]
    assert said.startswith("is set but has no effect: ")


def test_stages_are_gathered_by_collectives() -> None:
    asked = ["strategy.name=pipeline", "strategy.exchange=symmetric", "strategy.stages=2"]
    made = plan(*asked, "strategy.inner=zero3", machine=box(4))
    assert made.mesh == {"pp": 2, "dp": 2} and made.exchange_by.value == "collectives"
    assert "stages of a pipeline" in told(made)


@pytest.mark.parametrize(
    ("env", "strategy", "value", "because"),
    [
        (box(4), "zero3", "fused", "as asked"),
        (box(4, kind="pcie"), "zero2", "pipelined", "parts by collectives: there is no NVLink"),
        (machine(1), "zero3", "collectives", "one rank"),
        (box(4), "ddp", "collectives", "only zero2 and zero3"),
    ],
)
def test_products_take_weights_in_parts(env: Env, strategy: str, value: str, because: str) -> None:
    made = plan("strategy.exchange=fused", f"strategy.name={strategy}", machine=env)
    assert made.exchange_by.value == value and because in made.exchange_by.because
    assert ("fused was asked" in told(made)) == (value != "fused")


@pytest.mark.parametrize(
    "beside",
    [
        "strategy.accumulate=defer",
        "strategy.offload=true",
        "precision.mode=fp8",
        "train.compile=reduce-overhead",
    ],
)
def test_products_in_parts_are_refused_beside(beside: str) -> None:
    made = plan("strategy.exchange=fused", "strategy.name=zero3", beside, machine=box(4))
    assert any(finding.where == "strategy.exchange" for finding in made.problems())


def test_fused_products_without_a_matrix_are_told() -> None:
    asked = ["strategy.exchange=fused", "strategy.name=zero3", "launch.nproc=7"]
    assert "FSDP gathers them all" in told(plan(*asked, machine=box(7)))
    assert "FSDP gathers them all" not in told(plan(*asked[:2], machine=box(4)))
