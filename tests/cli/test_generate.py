"""`paceline generate`: which weights are read, what is printed, refused, and never run."""

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli import main
from paceline.config.schema import LaunchConfig
from paceline.generate.flow import Which, open_author
from paceline.launch.base import LaunchOrder, draw_plan
from paceline.records import BestMetric
from paceline.records.rundir import RunDir
from paceline.run.rank import TRAIN
from tests.cli.program import Ran
from tests.kept import flip_bit, keep, make_run
from tests.machines import machine, plan

SMALL = [
    "data.source=synthetic", "model.vocab_size=320", "model.dim=32", "model.num_layers=2",
    "model.num_heads=2", "model.num_kv_heads=2", "data.seq_len=64", "launch.device=cpu",
]  # fmt: skip
LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 320, "max_position_embeddings": 64,
}  # fmt: skip
CODE = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
from paceline.workloads.lm.workload import LanguageModel

class Mine(LanguageModel):
    pass
"""


@pytest.fixture
def generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Ran]:
    """The verb in this process, where torch is imported already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr("sys.argv", ["paceline", "generate", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err, err
        return Ran(int(left.value.code or 0), out, err)

    return call


def make(
    folder: Path, source: str = "lm_tiny", overrides: list[str] = SMALL, workload: str = "lm"
) -> tuple[RunDir, dict[str, Any]]:
    """A run directory as far as `generate` reads it, and first weights by name."""
    run, tensors = make_run(folder, source, overrides)
    planned = plan(*overrides, source=source)
    planned.save(run.plan)
    order = LaunchOrder(LaunchConfig(), planned.crew, machine(), 1, TRAIN, workload)
    draw_plan(order, argv=[], hosts=["box"]).save(run.launch)
    run.data.write_text("{}")
    return run, tensors


def weights(path: Path, **which: Any) -> torch.Tensor:
    author = open_author(str(path), Which(**which), lambda text: None)
    return author.model.get_parameter("embedding.weight").detach()


def test_one_prompt_is_streamed_and_several_are_listed(
    generate: Callable[..., Ran], tmp_path: Path
) -> None:
    run, tensors = make(tmp_path / "run")
    keep(run, tensors, 5)
    one = generate(run.root, "abc", "--max-new-tokens", 5, "--seed", 7)
    assert one.code == 0 and one.out.startswith("abc") and one.out.endswith("\n")
    assert "the weights of step 5, text as bytes, on cpu in fp32" in one.err
    listed = generate(run.root, "abc", "", "--max-new-tokens", 5, "--seed", 7, "--json")
    first, second = json.loads(listed.out)
    assert set(first) == {"prompt", "text", "num_tokens", "ended"}
    assert (first["prompt"], second["prompt"], first["num_tokens"]) == ("abc", "", 5)
    from paceline.records.words import visible

    assert one.out == visible(f"abc{first['text']}") + "\n"
    both = generate(run.root, "abc", "xyz", "--max-new-tokens", 5, "--seed", 7)
    assert both.out.startswith(one.out + "\nxyz")
    assert generate(run.root, "abc", "--max-new-tokens", 5, "--seed", 8).out != one.out
    full = generate(run.root, "a" * 60, "--max-new-tokens", 50, "--temperature", 0)
    assert "stopped after 5 tokens: the model's context is full" in full.err


def test_the_prompt_may_come_from_stdin(
    generate: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tensors = make(tmp_path / "run")
    keep(run, tensors, 5)
    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    assert generate(run.root, "-", "--max-new-tokens", 2).out.startswith("piped")


def test_the_best_checkpoint_is_read_or_the_one_that_is_named(tmp_path: Path) -> None:
    run, tensors = make(tmp_path / "run")
    head = tensors["embedding.weight"]
    keep(run, tensors, 5, best=BestMetric(step=5, value=1.0))
    keep(run, tensors | {"embedding.weight": head + 1}, 9, best=BestMetric(step=5, value=1.0))
    assert torch.equal(weights(run.root), head)
    assert torch.equal(weights(run.root, step="latest"), head + 1)
    assert torch.equal(weights(run.root, step="9"), head + 1)
    averaged = tensors | {f"ema/{name}": value + 2 for name, value in tensors.items()}
    keep(run, averaged, 12)
    assert torch.equal(weights(run.root, step="12"), head + 2)
    assert torch.equal(weights(run.root, step="12", ema=False), head)


def test_what_is_computed_and_not_kept_is_there(tmp_path: Path) -> None:
    run, tensors = make(tmp_path / "run")
    keep(run, tensors, 5)
    model: Any = open_author(str(run.root), Which(), lambda text: None).model
    cos, sin = model._rope_tables()
    assert torch.equal(model.rope_cos, cos) and torch.equal(model.rope_sin, sin)


def test_a_damaged_checkpoint_is_not_read(generate: Callable[..., Ran], tmp_path: Path) -> None:
    run, tensors = make(tmp_path / "run")
    folder = keep(run, tensors, 5)
    flip_bit(next(folder.path(5).glob("model*.safetensors")))
    assert generate(run.root, "a").code == 9
    empty, _ = make(tmp_path / "empty")
    assert generate(empty.root, "a").code == 9


def test_what_is_neither_a_run_nor_a_model(generate: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in ("folder", "gone", "./gone"):
        ran = generate(path, "a")
        assert ran.code == 4 and "is neither a run directory" in ran.err
    (tmp_path / "folder" / "config.json").write_text('{"model_type": "paceline-lm"}')
    ran = generate("folder", "a")
    assert ran.code == 4 and "give the run directory" in ran.err
    ran = generate("folder", "a", "--step", "3")
    assert ran.code == 2 and "is not a run directory" in ran.err
    mae = tmp_path / "mae"
    pytest.importorskip("transformers")
    run, tensors = make(mae, "mae_tiny", ["launch.device=cpu"], "mae")
    keep(run, tensors, 5)
    ran = generate(mae, "a")
    assert ran.code == 2 and "MaskedAutoencoder generates no text" in ran.err
    assert ran.out == "", "the prompt is not shown before it is known to be continued"


def test_the_file_of_a_run_needs_trust(generate: Callable[..., Ran], tmp_path: Path) -> None:
    file = tmp_path / "sent" / "job.py"
    file.parent.mkdir()
    file.write_text(CODE)
    run, tensors = make(tmp_path / "run", workload=f"{file}:Mine")
    keep(run, tensors, 5)
    ran = generate(run.root, "a")
    assert ran.code == 2 and "nobody has typed that file" in ran.err
    assert not file.with_suffix(".ran").exists()
    ran = generate(run.root, "a", "--trust-code", "--max-new-tokens", 1)
    assert ran.code == 0 and file.with_suffix(".ran").exists()
    other, tensors = make(tmp_path / "other", workload=f"{tmp_path / 'other' / 'job.py'}:Mine")
    keep(other, tensors, 5)
    (other.root / "job.py").write_text(CODE)
    ran = generate(other.root, "a", "--trust-code")
    assert ran.code == 2 and "lies inside the run directory" in ran.err


def test_a_folder_of_transformers(generate: Callable[..., Ran], tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = library.LlamaForCausalLM(library.LlamaConfig(**LLAMA, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "model")
    ran = generate("model", "abc", "--max-new-tokens", 6, "--temperature", 0, "--json")
    assert ran.code == 0 and "has no tokenizer.json: text is bytes" in ran.err
    ids = model.generate(
        torch.tensor([list(b"abc")]), max_new_tokens=6, do_sample=False, eos_token_id=None,
        suppress_tokens=list(range(257, 320)),
    )[0, 3:].tolist()  # fmt: skip
    kept = ids[: ids.index(256)] if 256 in ids else ids
    assert json.loads(ran.out)[0]["text"] == bytes(kept).decode(errors="replace")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    ran = generate("model", "abc")
    assert ran.code == 4 and "is a pickle and can run code" in ran.err


def test_a_run_of_transformers_needs_none_of_its_first_weights(
    generate: Callable[..., Ran], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    keys = [f"model.hf_config.{key}={value}" for key, value in LLAMA.items()]
    keys += ["model.hf=llama", "data.source=synthetic", "data.seq_len=64", "launch.device=cpu"]
    run, tensors = make(tmp_path / "run", "tinyllama_fsdp", keys, "causal_lm")
    keep(run, tensors, 5)
    run.data.write_text(json.dumps({"hf_weights": "load"}))
    ran = generate(run.root, "abc", "xy", "--max-new-tokens", 4, "--json")
    assert ran.code == 0 and [row["num_tokens"] for row in json.loads(ran.out)] == [4, 4]
