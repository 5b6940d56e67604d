"""The loops that one GPU is timed by: hand-written, and those of Accelerate, Lightning and HF
Trainer as their documentation has them, on the same model, weights, optimizer and tokens.
gpu_throughput.py races them.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.cursor import Order
from paceline.data.synthetic import SyntheticTokens
from paceline.job import Job
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.plan.policy import effective_config
from paceline.strategies.blocks import find_blocks
from paceline.strategies.optim import optimizer_kind, parameter_groups
from paceline.strategies.weights import fill_weights
from paceline.train.torch_settings import allow_kernels

WARMUP = 10
CLIP = 1.0
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PEAK_FLOPS = 989.4e12


class Bench:
    """The model, its optimizer and its tokens, the same for everybody."""

    def __init__(self, job: Job, steps: int, warmup: int = WARMUP) -> None:
        self.job, self.steps, self.warmup = job, steps, warmup
        config = effective_config(job.config, "sdpa")
        self.micro, self.seq_len = config.train.micro_batch_size, config.data.seq_len
        with torch.device("meta"):
            self.model = job.workload.build_model(config)

    def choose_attention(self) -> None:
        """Let all of this process attend by what our plan chooses by itself, or is asked for."""
        plan = make_plan(self.job, probe())
        allow_kernels(plan.attention.value, is_compiled=True)

    def fill(self, model: nn.Module) -> None:
        fill_weights(model, self.model.init_module, self.job.config.train.seed, DEVICE)

    def compile(self) -> None:
        self.model.compile(dynamic=False)

    def batches(self) -> list[Tensor]:
        config = self.job.config
        data = SyntheticTokens(
            config.data.synthetic_samples, self.seq_len, config.model.vocab_size, config.train.seed
        )
        ids = Order(len(data), config.train.seed).at(np.arange(self.steps * self.micro))
        tokens = [data.batch(row)["tokens"] for row in ids.reshape(self.steps, self.micro)]
        return [batch.pin_memory() if ON_GPU else batch for batch in tokens]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optim = self.job.config.optim
        kind, settings = optimizer_kind(optim, fused=True)
        return kind(parameter_groups(model, optim), **settings)


class Turn(Bench):
    """One turn of a contender that shares weights and optimizer with those of `first`."""

    def __init__(self, first: Bench) -> None:
        super().__init__(first.job, first.steps, first.warmup)
        self.first = first

    def fill(self, model: nn.Module) -> None:
        """Take the weights of `first`: the same objects, under the same names."""
        for name, parameter in self.first.model.named_parameters():
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = parameter
        for name, buffer in self.first.model.named_buffers():
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._buffers[leaf] = buffer

    def compile(self) -> None:
        if self.model._compiled_call_impl is None:
            super().compile()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if not hasattr(self.first, "shared"):
            self.first.shared = self.first.optimizer(self.first.model)
        return self.first.shared


class Stopwatch:
    """Called before every step and once at the end: times what comes after the warm-up."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.step = bench, 0
        self.started_at = self.ended_at = 0.0

    def tick(self) -> None:
        if self.step == self.bench.warmup:
            _synchronize()
            self.started_at = time.perf_counter()
        self.step += 1

    def stop(self) -> None:
        """After the last step: what a library does to clean up is not training."""
        _synchronize()
        self.ended_at = time.perf_counter()

    def tokens_per_s(self) -> float:
        if not self.ended_at:
            self.stop()
        elapsed_s = self.ended_at - self.started_at
        steps = self.bench.steps - self.bench.warmup
        return steps * self.bench.micro * self.bench.seq_len / elapsed_s


def _synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    targets = tokens[:, 1:]
    return model(tokens[:, :-1], targets) / targets.numel()


def plain_loop(bench: Bench, model: nn.Module, autocast: bool) -> float:
    optimizer, parameters = bench.optimizer(model), list(model.parameters())
    watch = Stopwatch(bench)
    for tokens in bench.batches():
        watch.tick()
        tokens = tokens.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=autocast):
            loss = mean_loss(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return watch.tokens_per_s()


def hand(bench: Bench) -> float:
    bench.fill(bench.model)
    bench.compile()
    return plain_loop(bench, bench.model, autocast=True)


def ddp(bench: Bench) -> float:
    """Bare DistributedDataParallel on one rank."""
    bench.fill(bench.model)
    compile_blocks(bench.model)
    with one_rank():
        wrapped = nn.parallel.DistributedDataParallel(bench.model, gradient_as_bucket_view=True)
        return plain_loop(bench, wrapped, autocast=True)


def fsdp(bench: Bench) -> float:
    """Bare fully_shard on one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    compile_blocks(bench.model)
    with one_rank():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(DEVICE.type, (1,), mesh_dim_names=("dp",))
        for block in find_blocks(bench.model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(bench.model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        bench.fill(bench.model)
        return plain_loop(bench, bench.model, autocast=False)


def compile_blocks(model: nn.Module) -> None:
    for part in [*find_blocks(model), model.tail]:
        part.compile(dynamic=False)


class one_rank:  # noqa: N801  (a context manager)
    def __enter__(self) -> None:
        store = dist.HashStore()
        backend = "nccl" if ON_GPU else "gloo"
        device = torch.device("cuda", 0) if ON_GPU else None
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device)

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def iter_ticking(bench: Bench, watch: Stopwatch) -> Iterator[Tensor]:
    for tokens in bench.batches():
        watch.tick()
        yield tokens


class Ticking(torch.utils.data.IterableDataset):
    def __init__(self, bench: Bench, watch: Stopwatch) -> None:
        self.bench, self.watch = bench, watch

    def __iter__(self) -> Iterator[Tensor]:
        return iter_ticking(self.bench, self.watch)


def accelerate(bench: Bench) -> float:
    from accelerate import Accelerator

    bench.fill(bench.model)
    bench.compile()
    accelerator = Accelerator(mixed_precision="bf16", cpu=not ON_GPU)
    model, optimizer = accelerator.prepare(bench.model, bench.optimizer(bench.model))
    watch = Stopwatch(bench)
    for tokens in iter_ticking(bench, watch):
        tokens = tokens.to(DEVICE, non_blocking=True)
        with accelerator.autocast():
            loss = mean_loss(model, tokens)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return watch.tokens_per_s()


def lightning(bench: Bench) -> float:
    import lightning as pl

    bench.fill(bench.model)
    bench.compile()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = bench.model

        def training_step(self, tokens: Tensor, index: int) -> Tensor:
            return mean_loss(self.model, tokens)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return bench.optimizer(self.model)

        def on_train_end(self) -> None:
            watch.stop()

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            # Its own clipping refuses a fused optimizer under mixed precision.
            nn.utils.clip_grad_norm_(self.parameters(), CLIP, foreach=True)

    watch = Stopwatch(bench)
    loader = torch.utils.data.DataLoader(Ticking(bench, watch), batch_size=None)

    class Stay(pl.pytorch.strategies.SingleDeviceStrategy):
        def teardown(self) -> None:
            """Leave weights and state where they are: the next turn is another's."""

    trainer = pl.Trainer(
        strategy=Stay(torch.device("cuda", 0) if ON_GPU else DEVICE),
        max_steps=bench.steps, max_epochs=1,
        precision="bf16-mixed", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader)
    return watch.tokens_per_s()


def hf_trainer(bench: Bench) -> float:
    import transformers

    bench.fill(bench.model)
    bench.compile()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = bench.model

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            return {"loss": mean_loss(self.model, tokens)}

    class Loader(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
            for tokens in super().__iter__():
                watch.tick()
                yield {"tokens": tokens.to(DEVICE, non_blocking=True)}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return Loader(bench.batches())

    watch = Stopwatch(bench)
    optimizer = bench.optimizer(bench.model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=bench.steps, bf16=True, max_grad_norm=CLIP, report_to=[],
            save_strategy="no", disable_tqdm=True, logging_strategy="no", use_cpu=not ON_GPU,
            per_device_train_batch_size=bench.micro, remove_unused_columns=False,
        )  # fmt: skip
        Trainer(
            model=Wrapped(), args=arguments, train_dataset=[0] * bench.steps * bench.micro,
            optimizers=(optimizer, schedule),
        ).train()  # fmt: skip
    return watch.tokens_per_s()


LOOPS: dict[str, Callable[[Bench], float]] = {
    "hand": hand,
    "accelerate": accelerate,
    "lightning": lightning,
    "hf trainer": hf_trainer,
    "ddp": ddp,
    "fsdp": fsdp,
}
APART = ("ddp", "fsdp")  # with a process group of their own


def matmul_tflops(size: int = 8192, repeats: int = 20) -> float:
    """bf16 product of random square matrices: what the GEMM library reaches here."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        a @ b
    end.record()
    end.synchronize()
    return 2 * size**3 * repeats / (start.elapsed_time(end) / 1e3) / 1e12
