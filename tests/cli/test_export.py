"""`paceline export`: what it writes, that others load it, and what it does not let out."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli import main
from paceline.errors import SaveError
from paceline.export.flow import ExportOptions, export
from paceline.records import BestMetric
from paceline.run.trained import Which
from tests.cli.program import Ran
from tests.exports import LLAMA, LM, MAE, make
from tests.kept import flip_bit, keep

library = pytest.importorskip("transformers")


@pytest.fixture
def paceline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Ran]:
    """The program in this process, where torch is imported already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr("sys.argv", ["paceline", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err, err
        return Ran(int(left.value.code or 0), out, err)

    return call


def quiet(text: str) -> None: ...


def hashes_hold(folder: Path) -> bool:
    files = json.loads((folder / "manifest.json").read_text())["files"]
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert there == {*files, "manifest.json"}
    return all(
        hashlib.sha256((folder / name).read_bytes()).hexdigest() == each["sha256"]
        for name, each in files.items()
    )


def test_our_language_model_is_a_llama_of_transformers(
    paceline: Callable[..., Ran], tmp_path: Path
) -> None:
    run, _ = make(tmp_path / "run", num_ranks=3)
    ran = paceline("export", run.root)
    assert ran.code == 0 and ran.out.endswith("ok\n"), ran.err
    assert "compared on 2 samples of the train split" in ran.out
    assert "no tokenizer is written" in ran.err
    folder = run.root / "exported" / "safetensors"
    assert hashes_hold(folder)
    model = library.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is library.LlamaForCausalLM
    card = (folder / "README.md").read_text()
    assert 'from_pretrained("safetensors")' in card and "workload: lm" in card
    assert paceline("export", run.root).code == 2, "nothing is written over"
    assert paceline("export", run.root, "--overwrite", "--json").code == 0
    assert [path.name for path in folder.parent.iterdir()] == ["safetensors"]


@pytest.mark.slow
def test_formats_and_types_of_a_causal_lm(paceline: Callable[..., Ran], tmp_path: Path) -> None:
    run, tensors = make(tmp_path / "run", "causal_lm", LLAMA, "causal_lm", num_ranks=2)
    ran = paceline("export", run.root, "--format", "pytorch", "--output", "bin", "--json")
    report = json.loads(ran.out)
    assert ran.code == 0 and report["format"] == "pytorch" and report["num_tensors"] > 0
    state = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(state["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    ran = paceline("export", run.root, "--dtype", "bfloat16", "--output", "half")
    assert ran.code == 0
    model = library.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert model.dtype == torch.bfloat16
    ran = paceline("export", run.root, "--dtype", "int3", "--format", "gguf")
    assert ran.code == 2 and "--format gguf is not" in ran.err and "--dtype int3" in ran.err


def test_which_checkpoint(tmp_path: Path) -> None:
    run, tensors = make(tmp_path / "run")
    head = tensors["embedding.weight"]
    keep(run, tensors | {"embedding.weight": head + 1}, 9, best=BestMetric(step=5, value=1.0))
    for step, number in (("latest", 9), ("auto", 9), ("5", 5)):
        out = tmp_path / step
        report = export(run, ExportOptions(which=Which(step), out=out), quiet)
        found = library.AutoModelForCausalLM.from_pretrained(out).state_dict()
        assert report.step == number
        assert torch.equal(found["model.embed_tokens.weight"], head + (1 if number == 9 else 0))


def test_what_computes_something_else_is_not_let_out(
    paceline: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.workloads.lm import export as conversion

    run, _ = make(tmp_path / "run")
    monkeypatch.setitem(conversion.SAME, "attention_norm.weight", "post_attention_layernorm.weight")
    monkeypatch.setitem(conversion.SAME, "ffn_norm.weight", "input_layernorm.weight")
    head = run.root / "exported"
    export(run, ExportOptions(out=tmp_path / "same"), quiet)  # all norms are ones at first
    real = conversion._llama_config

    def other(model: Any) -> Any:
        found = real(model)
        found.rope_parameters["rope_theta"] = 77.0
        return found

    monkeypatch.setattr(conversion, "_llama_config", other)
    with pytest.raises(SaveError, match="computes another logits"):
        export(run, ExportOptions(), quiet)
    assert not any(head.iterdir()), "nothing is left of it"


def test_only_an_export_is_overwritten(paceline: Callable[..., Ran], tmp_path: Path) -> None:
    run, _ = make(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "manifest.json").write_text('{"kind": "a thesis"}')
    ran = paceline("export", run.root, "--output", "mine", "--overwrite")
    assert ran.code == 2 and "no export wrote it" in ran.err
    assert (tmp_path / "mine" / "manifest.json").is_file()


def test_a_damaged_checkpoint_and_a_job_without_a_library(
    paceline: Callable[..., Ran], tmp_path: Path
) -> None:
    run, _ = make(tmp_path / "run")
    flip_bit(next((run.root / "checkpoints" / "step_5").glob("model*.safetensors")))
    assert paceline("export", run.root).code == 9
    assert not (run.root / "exported").exists()
    run, _ = make(tmp_path / "uneven", "lm_tiny", LM, "uneven")
    ran = paceline("export", run.root)
    assert ran.code in (2, 4)


def test_a_rank_above_zero_writes_nothing(
    paceline: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make(tmp_path / "run")
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost",
                        "MASTER_PORT": 1}.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    assert paceline("export", run.root).code == 0
    assert not (run.root / "exported").exists()


def test_images(paceline: Callable[..., Ran], tmp_path: Path) -> None:
    run, _ = make(tmp_path / "run", "mae_tiny", MAE, "mae")
    ran = paceline("export", run.root, "--json")
    assert ran.code == 0, ran.err
    assert [row["output"] for row in json.loads(ran.out)["compared"]] == ["logits", "mask"]
    library.ViTMAEForPreTraining.from_pretrained(run.root / "exported" / "safetensors")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("source", "overrides", "workload"),
    [("lm_tiny", LM, "lm"), ("causal_lm", LLAMA, "causal_lm"), ("mae_tiny", MAE, "mae")],
)
def test_graphs(
    paceline: Callable[..., Ran], tmp_path: Path, source: str, overrides: list[str], workload: str
) -> None:
    pytest.importorskip("onnxruntime")
    run, _ = make(tmp_path / "run", source, overrides, workload)
    ran = paceline("export", run.root, "--format", "onnx")
    assert ran.code == 0 and "onnxruntime" in ran.out, ran.err
    folder = run.root / "exported" / "onnx"
    assert (folder / "model.onnx").is_file() and (folder / "config.json").is_file()
    assert hashes_hold(folder) and not list(folder.glob("*.safetensors"))
