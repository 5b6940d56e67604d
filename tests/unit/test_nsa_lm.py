"""The language model with native sparse attention: cache, figures, route, audit, variables."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from paceline.attention import stats
from paceline.attention.crossover import Crossover, Shape, Timed, judge, kept_path
from paceline.attention.nsa import Settings
from paceline.attention.sizes import Sizes
from paceline.cli.train import _read_variables
from paceline.config.nsa_variables import VARIABLES, read_variables
from paceline.errors import ConfigError
from paceline.job import load_job
from paceline.plan.policy import keep_route
from paceline.records import Env
from paceline.strategies.weights import fill_weights
from paceline.train.audit_sparse import find_ranges, sparse_proofs
from paceline.workloads.lm.export import as_llama
from paceline.workloads.lm.model import flops_per_token
from paceline.workloads.lm.nsa import Sparse, SparseLM, sparse_flops_per_token
from paceline.workloads.lm.workload import LMModel
from tests.machines import machine, plan

CONFIG = LMModel(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=64)
SIZES = Sizes(l=8, d=4, l_sel=16, n_sel=3, w=11)
H200 = machine(num_gpus=1)
LONG = ["attention.impl=nsa", "data.seq_len=8192"]


def build(phi: str = "avg", seq_len: int = 80) -> SparseLM:
    with torch.device("meta"):
        model = SparseLM(CONFIG, seq_len, Sparse(Settings(SIZES), phi))
    fill_weights(model, model.init_module, 0, torch.device("cpu"))
    return model


@pytest.mark.parametrize("phi", ["avg", "mlp"])
def test_token_by_token_is_all_at_once(phi: str) -> None:
    """Rows of unequal length end together; each sees what it would see alone."""
    model, lengths = build(phi).eval(), (70, 41, 2)
    rows = [torch.randint(64, (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths]
    with torch.no_grad():
        expected = [model(row)[0] for row in rows]
    prompt = [row[:, : row.shape[1] // 2] for row in rows]
    longest = max(part.shape[1] for part in prompt)
    pads = torch.tensor([longest - part.shape[1] for part in prompt])
    padded = [torch.nn.functional.pad(part, (longest - part.shape[1], 0)) for part in prompt]
    past = model.new_past(pads, longest + 80)
    with torch.no_grad():
        logits = model(torch.cat(padded), past=past)[:, -1]
        for step in range(35):
            for row, (found, whole) in enumerate(zip(logits, expected, strict=True)):
                at = prompt[row].shape[1] - 1 + step
                if at < len(whole):
                    torch.testing.assert_close(found, whole[at], rtol=1e-4, atol=1e-5)
            at = [min(part.shape[1] + step, n - 1) for part, n in zip(prompt, lengths, strict=True)]
            new = torch.cat([row[:, i : i + 1] for row, i in zip(rows, at, strict=True)])
            logits = model(new, past=past)[:, -1]


def test_others_have_no_form_of_it() -> None:
    with pytest.raises(ConfigError, match="no other program has native sparse attention") as error:
        as_llama(build())
    assert "paceline generate" in str(error.value)


def test_documents_do_not_see_each_other() -> None:
    model = build().eval()
    tokens = torch.randint(64, (1, 60), generator=torch.Generator().manual_seed(0))
    positions = torch.cat((torch.arange(27), torch.arange(33)))[None]
    with torch.no_grad():
        together = model(tokens, positions_BT=positions)
        tokens[:, :27] = 63 - tokens[:, :27]
        changed = model(tokens, positions_BT=positions)
    assert torch.equal(together[:, 27:], changed[:, 27:])
    assert not torch.equal(together[:, :27], changed[:, :27])


def test_gates_begin_nearly_open() -> None:
    attention = build().blocks[0].attention
    gates = attention._gates(torch.randn(1, 5, attention.gate_in.in_features))
    torch.testing.assert_close(gates, torch.full_like(gates, 0.88), atol=0.05, rtol=0)


def test_gates_and_choices_in_numbers() -> None:
    gates = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.5]]).view(1, 2, 1, 3)
    blocks = torch.tensor([[0, -1], [0, 1]]).view(1, 2, 1, 2).repeat(1, 8, 1, 1)  # 16 tokens
    found = dict(zip(stats.NAMES, stats.measure(gates, blocks, 8).tolist(), strict=True))
    assert found["gate_cmp"] == pytest.approx(0.75) and found["gate_win"] == pytest.approx(0.25)
    # One of two rows is all on one gate (entropy 0), the other is even (log 3).
    assert found["gate_entropy"] == pytest.approx(1.0986 / 2, rel=1e-4)
    assert found["gate_collapse"] == pytest.approx(0.5)
    # Block 0 is chosen 16 times, block 1 8 times: entropy of (2/3, 1/3) over log 2.
    assert found["selection_entropy"] == pytest.approx(0.9183, rel=1e-4)
    # Block 0 is t back, on average 7.5; block 1, of odd t, is t - 8: 0 on average.
    assert found["selection_reach"] == pytest.approx((16 * 7.5 + 8 * 0) / 24)


def test_flops_are_those_of_the_keys_that_are_seen() -> None:
    asked = load_job("nsa_m7c", []).config.attention.nsa
    config = LMModel(dim=768, num_layers=12, num_heads=12, num_kv_heads=2, ffn_dim=2048)
    T = 65536
    sparse, dense = sparse_flops_per_token(config, T, asked), flops_per_token(config, T)
    assert sparse < dense / 2
    # By hand: (T + 1 - l) / d / 2 compressed keys, 16 blocks less half of one, 512, nearly.
    seen = Sizes.of(asked).seen(T)
    assert seen == pytest.approx((2047, 992, 510), rel=0.01)
    because = plan(*LONG, source="nsa_m7c", machine=machine()).flops_per_sample.because
    assert "with dense attention it would be" in because


@pytest.mark.parametrize("T", [1, 7, 31, 32, 47, 48, 1023, 1024, 1025, 1100, 3000])
def test_keys_that_are_seen_are_summed_as_if_query_by_query(T: int) -> None:
    for z in (Sizes(), Sizes(l=4, d=4, l_sel=8, n_sel=2, w=5)):
        most = z.n_sel * z.l_sel
        compressed = sum(z.num_compressed(t + 1) for t in range(T)) / T
        selected = sum(min(t + 1, most - z.l_sel + t % z.l_sel + 1) for t in range(T)) / T
        window = sum(min(t + 1, z.w) for t in range(T)) / T
        assert z.seen(T) == (compressed, selected, window)


def test_dense_attention_below_the_measured_crossover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = [(4096, 1.0, 2.0), (8192, 3.0, 3.1), (16384, 9.0, 6.0), (32768, 36.0, 12.0)]
    timed = [Timed(length=n, dense_ms=a, nsa_ms=b, dense_kernel="cudnn") for n, a, b in rows]
    shape = Shape(4, 2, 32)  # of lm_tiny
    path = kept_path(H200, shape)
    path.parent.mkdir(parents=True)
    Crossover(measured_at=1.0, torch_version="2", timed=timed, length=judge(timed)).save(path)
    short = plan(*LONG, machine=H200).attention
    assert (short.requested, short.value) == ("nsa", "sdpa") and "16384 tokens on" in short.because
    assert plan(*LONG, "data.seq_len=16384", machine=H200).attention.value == "nsa"
    assert plan(*LONG, "attention.nsa.route=sparse", machine=H200).attention.value == "nsa"
    assert plan(*LONG, machine=machine()).attention.value == "nsa"  # CPU: nothing is faster


def test_other_kernels_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier Paceline found slower may be faster now."""
    shape, source = Shape(4, 2, 32), tmp_path / "banded.py"
    source.write_text("one = 1")
    monkeypatch.setattr("paceline.attention.crossover.SOURCES", tmp_path)
    before = kept_path(H200, shape)
    assert kept_path(H200, shape) == before
    source.write_text("one = 2")
    assert kept_path(H200, shape) != before


@pytest.mark.parametrize(("began", "impl"), [("nsa", "nsa"), ("sdpa", "sdpa")])
def test_a_run_resumes_with_the_attention_it_began_with(began: str, impl: str) -> None:
    made = plan("attention.impl=nsa")
    begun = made.model_copy(
        update={"attention": made.attention.model_copy(update={"value": began})}
    )
    kept = keep_route(load_job("lm_tiny", ["attention.impl=nsa"]).config, begun).attention
    assert (kept.impl, kept.nsa.route) == (impl, "sparse")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="d must divide l"):
        load_job("lm_tiny", ["attention.nsa.d=12"])
    idle = plan("attention.nsa.w=64").findings
    assert any(found.where == "attention.nsa" and "no effect" in found.what for found in idle)


@pytest.mark.parametrize(
    ("asked", "env", "where", "says"),
    [
        (["kernels=triton"], machine(), "kernels", "the ranks are on CPU"),
        (["l_sel=48"], H200, "l_sel", "l_sel 48 over d 16: not powers"),
        (["l_sel=48", "kernels=triton"], H200, "l_sel", "l_sel 48 over d 16: not powers"),
        (["ranges=v1"], H200, "ranges", "Triton reads the blocks themselves"),
    ],
)
def test_what_kernels_cannot_take_is_said(
    asked: list[str], env: Env, where: str, says: str
) -> None:
    words = [f"attention.nsa.{word}" for word in (*asked, "route=sparse")]
    made = plan("attention.impl=nsa", *words, machine=env)
    said = [f for f in made.findings if f.where == f"attention.nsa.{where}"]
    assert len(said) == 1 and says in said[0].what
    assert (said[0].severity == "error") == ("kernels=triton" in asked)


def test_wide_heads_are_left_to_torch() -> None:
    asked = ["attention.impl=nsa", "attention.nsa.route=sparse", "model.dim=1536",
             "model.num_heads=4", "model.num_kv_heads=2"]  # fmt: skip
    (said,) = (f for f in plan(*asked, machine=H200).findings if "nsa" in f.where)
    assert "heads of 384" in said.what and said.severity == "warning"
    for head, ours in ((256, True), (384, False)):
        q = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(1, 1, 4, head))
        assert Settings().uses_kernels(q) == ours  # type: ignore[arg-type]


@pytest.mark.slow  # imports transformers
def test_other_workloads_have_it_not() -> None:
    refused = plan("attention.impl=nsa", source="mae_tiny").problems()
    assert "mae has no nsa attention" in refused[0].what


def test_the_audit_names_each_branch() -> None:
    model, tokens = build(), torch.randint(64, (1, 40))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as taken:
        model(tokens, tokens).backward()
    ranges = find_ranges(taken.profiler.kineto_results.events())  # type: ignore[union-attr]
    made = plan("attention.impl=nsa", machine=machine())
    said = {proof.what: proof for proof in sparse_proofs(made, ranges)}
    assert "scaled_dot_product" in said["attention: window"].effective
    assert "bmm" in said["attention: compressed"].effective
    assert all(proof.ok for proof in said.values()) and len(said) == 4
    on_gpu = plan("attention.impl=nsa", "attention.nsa.route=sparse", machine=H200)
    assert not any(proof.ok for proof in sparse_proofs(on_gpu, ranges)), "plain torch, and slow"


@pytest.mark.parametrize("ranges", ["v1", "v2"])
def test_ranges_of_the_runbook_are_marked(ranges: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    for place in ("attention.nsa", "workloads.lm.nsa"):
        monkeypatch.setattr(
            f"paceline.{place}.mark", lambda name, *_: told.append(name) or nullcontext()
        )
    with torch.device("meta"):
        model = SparseLM(CONFIG, 40, Sparse(Settings(SIZES, ranges=ranges)))
    fill_weights(model, model.init_module, 0, torch.device("cpu"))
    model(torch.zeros(1, 20, dtype=torch.int64))
    assert told == 2 * [
        "projections+rope", "pcmp_all", "nsa.cmp", "map_pcmp_to_pslc", "nsa.choose", "topk+ranges",
        f"nsa.sel.ranges_{ranges}", "branch_attn+gate", "nsa.sel", "nsa.win", "nsa.gate",
    ]  # fmt: skip


def test_variables_of_the_runbook() -> None:
    asked = read_variables(
        {"NSA_PREFILL_BATCHED": "1", "NSA_SEL_RANGES_V2": "0", "NSA_DDP_COMPRESS": "bf16",
         "NSA_DDP_BUCKET_MB": "50", "NSA_OPT_FUSED": "1", "NSA_PG_TIMEOUT_MIN": "15",
         "NSA_DDP_DISABLE_GC": "0", "NSA_WATCH_HEARTBEAT_STALL_S": "90", "PATH": "/bin",
         "NSA_WATCH_GATE_ENTROPY_MIN": "0.3", "NSA_MEM_DUMP_EVERY": "100"}
    )  # fmt: skip
    assert asked.words == [
        "attention.nsa.ranges=v1", "strategy.comm_hook=bf16", "strategy.bucket_mb=50",
        "optim.fused=on", "launch.collective_timeout_s=900",
        "observe.rules.heartbeat_stall_s=90", "observe.rules.gate_entropy_min=0.3",
        "observe.memory=dumps", "observe.memory_every=100",
    ]  # fmt: skip
    assert len(asked.notes) == 1 and "NSA_PREFILL_BATCHED changes nothing" in asked.notes[0]
    job = load_job("nsa_m7c", asked.words)
    assert job.config.observe.rules.heartbeat_stall_s == 90
    assert job.config.observe.memory_every == 100
    assert read_variables({"NSA_MEM_DUMP_EVERY": "0"}).words == []
    batch = read_variables({"NSA_BATCH_SIZE": "6"}).words
    assert plan(*batch, "launch.nproc=2", source="nsa_m7c").batch.grad_accum == 3
    assert read_variables({"NSA_BATCH_SIZE": "8", "NSA_ACCUM": "4"}).words == [
        "train.global_batch_size=8", "train.grad_accum=4",
    ]  # fmt: skip
    with pytest.raises(ConfigError) as error:
        read_variables(
            {
                "NSA_SEL_RANGE_V2": "1",
                "NSA_FORCE_BRANCH": "cmp",
                "NSA_LR": "x",
                "NSA_OPT_FUSED": "y",
            }
        )
    for said in ("no variable NSA_SEL_RANGE_V2", "all three branches", "NSA_LR=x", "one of 1, 0"):
        assert said in str(error.value)


def test_one_of_several_ranks_says_what_variables_ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_DDP_BUCKET_MB", "50")
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for rank, said in (("0", "from the environment: strategy.bucket_mb=50\n"), ("1", "")):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, **launched}.items():
            monkeypatch.setenv(name, value)
        assert _read_variables() == ["strategy.bucket_mb=50"]
        assert capsys.readouterr().err == said


def test_the_page_lists_every_variable() -> None:
    page = (Path(__file__).parents[2] / "docs/nsa.md").read_text()
    assert re.findall(r"^\| `(NSA_\w+)` \|", page, re.MULTILINE) == list(VARIABLES)
