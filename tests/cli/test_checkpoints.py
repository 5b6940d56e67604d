"""`paceline checkpoints`: what is listed, what is believed, what other tools can load."""

import json
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoint import convert
from paceline.checkpoint.folder import CheckpointFolder, seal
from paceline.cli import main
from paceline.config.schema import CheckpointConfig
from paceline.errors import PacelineError
from paceline.records import BestMetric, Manifest
from paceline.records.rundir import RunDir
from tests.cli.program import Ran, paceline
from tests.kept import TINY_LM, flip_bit, keep, make_run

Program = Callable[..., Ran]
LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 320, "max_position_embeddings": 64,
}  # fmt: skip
MAE = {
    "image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 32, "decoder_hidden_size": 8,
    "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 16,
}  # fmt: skip


@pytest.fixture
def checkpoints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Program:
    """The verb in this process, where torch is imported already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr("sys.argv", ["paceline", "checkpoints", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err, err
        return Ran(int(left.value.code or 0), out, err)

    return call


@pytest.fixture
def kept(tmp_path: Path) -> tuple[RunDir, CheckpointFolder, dict[str, Any]]:
    """A small language model with checkpoints of steps 10, 20 (the best) and 30."""
    run, tensors = make_run(tmp_path / "run", "lm_tiny", TINY_LM)
    best = BestMetric(step=20, value=2.5)
    keep(run, tensors, 10)
    keep(run, tensors, 20, best=best)
    return run, keep(run, tensors, 30, best=best), tensors


def settings(given: dict[str, Any]) -> list[str]:
    return [f"model.hf_config.{key}={json.dumps(value)}" for key, value in given.items()]


def reseal(folder: CheckpointFolder, step: int, **changed: Any) -> None:
    """A manifest that somebody has edited who knows how it is sealed."""
    path = folder.path(step) / "manifest.json"
    seal(Manifest.load(path).model_copy(update=changed)).save(path)


# list


def test_list_shows_each_at_a_glance(checkpoints: Program, kept: Any) -> None:
    run, folder, _ = kept
    ran = checkpoints("list", run.root)
    assert (ran.code, ran.err) == (0, "")
    title, *rows = ran.out.splitlines()
    assert (
        title.split() == "step saved (UTC) reason size state by precision best so far looks".split()
    )
    assert [row.split()[0] for row in rows] == ["30", "20", "10"]
    assert "2023-11-14 22:13:50  every" in rows[0] and "single x 1  fp32" in rows[0]
    assert (
        "val/loss 2.5 at step 20" in rows[0] and "latest" in rows[0] and "best" in rows[1].split()
    )
    assert all(row.rstrip().endswith("complete") for row in rows)
    found = json.loads(checkpoints("list", run.root, "--json").out)
    assert [(f["step"], f["is_latest"], f["is_best"]) for f in found] == [
        (30, True, False), (20, False, True), (10, False, False),
    ]  # fmt: skip
    assert found[0]["state"] == "sharded" and found[0]["path"] == str(folder.path(30))


def test_list_sees_what_is_missing_cut_short_or_left_over(checkpoints: Program, kept: Any) -> None:
    run, folder, _ = kept
    (folder.path(30) / "model-rank0.safetensors").write_bytes(b"short")
    (folder.path(20) / "manifest.json").unlink()
    (folder.path(10) / "state.json").unlink()
    folder.temporary(40, 1).mkdir()
    ran = checkpoints("list", run.root)
    assert ran.code == 0
    flat = " ".join(ran.out.split())
    assert "incomplete: step_30/model-rank0.safetensors has 5 bytes, and had" in flat
    assert "incomplete: step_20 is incomplete:" in flat and "step_10/state.json is missing" in flat
    assert "note: .tmp-step_40-1 is not a checkpoint" in ran.err


def test_list_says_where_pointers_lead(checkpoints: Program, kept: Any) -> None:
    run, folder, _ = kept
    (folder.root / "latest").write_text("step_99\n")
    (folder.root / "best").write_bytes(b"\xff\xfe step_1")
    ran = checkpoints("list", run.root)
    assert ran.code == 0 and "note: latest names step_99, which is not here" in ran.err
    (folder.root / "latest").write_text("step_" + "9" * 5000)
    assert "note: latest names no checkpoint" in checkpoints("list", run.root).err


def test_checkpoints_may_lie_elsewhere(checkpoints: Program, tmp_path: Path) -> None:
    place = tmp_path / "large disk"
    run, tensors = make_run(
        tmp_path / "run",
        "lm_tiny",
        [*TINY_LM, f"checkpoint.dir='{place}'", "checkpoint.state=full"],
    )
    config = CheckpointConfig(mode="sync", dir=str(place), state="full")
    keep(run, tensors, 7, num_ranks=2, config=config)
    assert (place / "run" / "step_7" / "model.safetensors").is_file()
    (found,) = json.loads(checkpoints("list", run.root, "--json").out)
    assert (found["step"], found["state"], found["world_size"]) == (7, "full", 2)
    assert "compared" in checkpoints("convert", run.root).out


def test_nothing_kept_is_said(checkpoints: Program, tmp_path: Path) -> None:
    run, _ = make_run(tmp_path / "run", "lm_tiny", TINY_LM)
    ran = checkpoints("list", run.root)
    assert (ran.code, ran.out) == (0, "") and "there is no checkpoint in" in ran.err
    assert checkpoints("list", run.root, "--json").out == "[]\n"
    for verb in ("verify", "convert"):
        ran = checkpoints(verb, run.root)
        assert (ran.code, ran.out) == (9, "") and "there is no checkpoint in" in ran.err
    assert not (run.root / "converted").exists()


# verify


def test_verify_reads_all_and_names_the_newest_sound_one(checkpoints: Program, kept: Any) -> None:
    run, folder, _ = kept
    ran = checkpoints("verify", run.root)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("sound: 4 files") == 3 and "3 of 3 sound" in ran.out
    flip_bit(folder.path(30) / "model-rank0.safetensors")
    assert "complete" in checkpoints("list", run.root).out, "a glance does not see a bit"
    ran = checkpoints("verify", run.root)
    assert ran.code == 1
    assert "step_30        DAMAGED: step_30/model-rank0.safetensors has changed" in ran.out
    assert "2 of 3 sound; the newest sound one is step_20" in ran.out
    found = json.loads(checkpoints("verify", run.root, "--json").out)
    assert found["newest_sound"] == 20
    assert [c["is_sound"] for c in found["checkpoints"]] == [False, True, True]


def test_verify_when_none_is_sound(checkpoints: Program, kept: Any) -> None:
    run, folder, _ = kept
    (folder.path(30) / "manifest.json").write_text("{}")
    (folder.path(20) / "rng-rank0.safetensors").unlink()
    reseal(folder, 10, model={})  # the sum is right, and then it is edited
    text = (folder.path(10) / "manifest.json").read_text()
    (folder.path(10) / "manifest.json").write_text(text.replace('"step": 10', '"step": 11'))
    ran = checkpoints("verify", run.root)
    assert ran.code == 9 and "no checkpoint in" in ran.err and "can be trusted" in ran.err
    assert ran.out.count("DAMAGED") == 3 and "step_20/rng-rank0.safetensors is missing" in ran.out
    ran = checkpoints("verify", run.root, "--json")
    assert ran.code == 9 and json.loads(ran.out)["newest_sound"] is None


def test_tensors_in_files_without_a_sum_are_not_believed(
    checkpoints: Program, kept: Any, tmp_path: Path
) -> None:
    run, folder, _ = kept
    save_file({"embedding.weight": torch.zeros(64, 32)}, tmp_path / "other.safetensors")
    model = Manifest.load(folder.path(30) / "manifest.json").model
    entry = model["embedding.weight"]
    outside = entry.parts[0].model_copy(update={"file": "../../../other.safetensors"})
    moved = entry.model_copy(update={"parts": [outside]})
    reseal(folder, 30, model=model | {"embedding.weight": moved})
    ran = checkpoints("convert", run.root)
    assert ran.code == 9 and "no checksum for '../../../other.safetensors'" in ran.err


# convert


def test_convert_writes_reloads_and_compares(checkpoints: Program, kept: Any) -> None:
    run, _, tensors = kept
    ran = checkpoints("convert", run.root)
    assert (ran.code, ran.err) == (0, "")
    assert "run/converted/step_30: step 30, paceline-lm" in ran.out
    assert f"reloaded and compared: {len(tensors)} tensors equal" in ran.out
    made = run.root / "converted" / "step_30"
    found = load_file(made / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    body = json.loads((made / "config.json").read_text())
    assert body["model_type"] == "paceline-lm" and body["model"]["dim"] == 32
    assert [path.name for path in (run.root / "converted").iterdir()] == ["step_30"]
    again = checkpoints("convert", run.root)
    assert again.code == 2 and "nothing is written over" in again.err


def test_convert_puts_the_parts_of_ranks_together(checkpoints: Program, tmp_path: Path) -> None:
    run, tensors = make_run(tmp_path / "run", "lm_tiny", TINY_LM)
    tensors |= {"norm": torch.tensor([float("nan"), 1.0, 2.0]), "count": torch.tensor(3)}
    keep(run, tensors, 5, num_ranks=3)
    ran = checkpoints("convert", run.root, "--json")
    assert json.loads(ran.out)["num_tensors"] == len(tensors), ran.err
    found = load_file(run.root / "converted" / "step_5" / "model.safetensors")
    assert all(found[n].equal(v) for n, v in tensors.items() if n != "norm")
    assert found["norm"].view(torch.int32).equal(tensors["norm"].view(torch.int32))


def test_convert_writes_the_average_where_there_is_one(
    checkpoints: Program, tmp_path: Path
) -> None:
    run, tensors = make_run(tmp_path / "run", "lm_tiny", TINY_LM)
    first, *others = tensors
    keep(run, tensors | {f"ema/{first}": tensors[first] + 1}, 5)
    assert checkpoints("convert", run.root, "--ema").code == 0
    found = load_file(run.root / "converted" / "step_5" / "model.safetensors")
    assert found[first].equal(tensors[first] + 1)
    assert all(found[name].equal(tensors[name]) for name in others), "frozen ones, and buffers"
    keep(run, tensors, 6)
    ran = checkpoints("convert", run.root, "--ema")
    assert ran.code == 2 and "has no average of the weights" in ran.err and "optim.ema" in ran.err


@pytest.mark.parametrize(
    ("step", "code", "says"),
    [
        ("best", 0, "step 20"), ("latest", 0, "step 30"), ("10", 0, "step 10"),
        ("step_10", 0, "step 10"), ("11", 2, "there are 30, 20, 10"),
        ("newest", 2, "is not a step"), ("-1", 2, ""), ("\u0661\u0660", 2, "is not a step"),
    ],
)  # fmt: skip
def test_which_one_is_converted(
    checkpoints: Program, kept: Any, tmp_path: Path, step: str, code: int, says: str
) -> None:
    run, folder, _ = kept
    (folder.root / "latest").unlink()  # a resume does not need it either
    ran = checkpoints("convert", run.root, step, "--out", tmp_path / "made")
    assert ran.code == code and says in ran.out + ran.err


def test_there_may_be_no_best(checkpoints: Program, kept: Any) -> None:
    run, folder, _ = kept
    shutil.rmtree(folder.path(20))
    ran = checkpoints("convert", run.root, "best")
    assert ran.code == 9 and "best names step_20, which is not in" in ran.err
    (folder.root / "best").unlink()
    ran = checkpoints("convert", run.root, "best")
    assert ran.code == 9 and "train.eval_every" in ran.err


def test_convert_refuses_a_damaged_one_by_name(checkpoints: Program, kept: Any) -> None:
    run, folder, _ = kept
    flip_bit(folder.path(30) / "model-rank0.safetensors")
    ran = checkpoints("convert", run.root)
    assert ran.code == 9 and "step_30/model-rank0.safetensors has changed" in ran.err
    assert not (run.root / "converted").exists()
    assert checkpoints("convert", run.root, "20").code == 0


def test_convert_writes_over_nothing(checkpoints: Program, kept: Any, tmp_path: Path) -> None:
    run, _, _ = kept
    for used in ("file", "folder"):
        (tmp_path / used).mkdir() if used == "folder" else (tmp_path / used).write_text("mine")
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    for used in ("file", "folder", "file/below"):
        ran = checkpoints("convert", run.root, "--out", tmp_path / used)
        assert ran.code in (2, 8) and used in ran.err
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "mine.txt").read_text()
    (tmp_path / "empty").mkdir()
    assert checkpoints("convert", run.root, "--out", tmp_path / "empty").code == 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp")]


def test_of_three_converts_at_once_one_wins_and_the_others_say_so(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, tensors = kept
    all_have_written, compared = threading.Barrier(3), convert.require_equal

    def wait_for_the_others(*words: Any) -> int:
        all_have_written.wait(20)
        return compared(*words)

    monkeypatch.setattr(convert, "require_equal", wait_for_the_others)

    def try_it(_: int) -> Any:
        try:
            return convert.convert(run, "latest", None, lambda text: None)
        except PacelineError as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(try_it, range(3)))
    losers = [end for end in ends if isinstance(end, PacelineError)]
    assert [loser.exit_code for loser in losers] == [2, 2], ends
    assert all("already exists, and nothing is written over" in str(loser) for loser in losers)
    assert [path.name for path in (run.root / "converted").iterdir()] == ["step_30"]
    found = load_file(run.root / "converted" / "step_30" / "model.safetensors")
    assert all(found[name].equal(value) for name, value in tensors.items())


def test_what_is_not_equal_gets_no_name(
    checkpoints: Program, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, tensors = kept
    monkeypatch.setattr(
        "paceline.checkpoint.convert.load_file",
        lambda path: load_file(path) | {"embedding.weight": tensors["embedding.weight"] + 1},
    )
    ran = checkpoints("convert", run.root)
    assert ran.code == 8 and "is not what the checkpoint has: ['embedding.weight']" in ran.err
    assert list((run.root / "converted").iterdir()) == []


@pytest.mark.parametrize("given", [LLAMA, LLAMA | {"tie_word_embeddings": True}], ids=["", "tied"])
def test_a_causal_lm_loads_with_transformers(
    checkpoints: Program, tmp_path: Path, given: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    overrides = ["data.source=synthetic", "data.seq_len=16", *settings(given)]
    run, tensors = make_run(tmp_path / "run", "tinyllama_fsdp", overrides)
    keep(run, tensors, 3, num_ranks=2)
    ran = checkpoints("convert", run.root, "--out", "made")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("made: step 3, LlamaForCausalLM\n")
    assert "compared: 21 tensors equal" in ran.out
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    state = model.state_dict()
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)
    assert ("lm_head.weight" in tensors) != ("tie_word_embeddings" in given)
    assert {"config.json", "model.safetensors"} <= {p.name for p in (tmp_path / "made").iterdir()}


def test_a_mae_loads_with_transformers(checkpoints: Program, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run, tensors = make_run(tmp_path / "run", "mae_tiny", settings(MAE))
    keep(run, tensors, 3)
    ran = checkpoints("convert", run.root, "--out", "made")
    assert ran.code == 0 and f"compared: {len(tensors)} tensors equal" in ran.out, ran.err
    state = transformers.ViTMAEForPreTraining.from_pretrained(tmp_path / "made").state_dict()
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)


def test_a_checkpoint_of_another_model_is_refused(checkpoints: Program, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run, tensors = make_run(tmp_path / "run", "mae_tiny", settings(MAE))
    keep(run, {"other": torch.ones(3)}, 3)
    ran = checkpoints("convert", run.root)
    assert ran.code == 2 and "not of the model in run.yaml" in ran.err and "1 too many" in ran.err
    assert list((run.root / "converted").iterdir()) == []


# what a run directory from elsewhere may hold


def test_a_job_of_ones_own_is_not_imported(checkpoints: Program, kept: Any, tmp_path: Path) -> None:
    run, _, _ = kept
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    text = run.config.read_text().replace("workload: lm", f"workload: {trap}:Mine")
    run.config.write_text(text)
    assert "trap.py" in run.config.read_text()
    for verb in ("list", "verify", "convert"):
        assert checkpoints(verb, run.root).code == 0
    body = json.loads((run.root / "converted" / "step_30" / "config.json").read_text())
    assert body["model_type"] == "paceline-Mine" and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("checkpoint: !!python/object/apply:os.system ['touch ran']", "the YAML tag"),
        ("checkpoint: {dir: [1, 2]}", "dir in the section checkpoint"),
        ('checkpoint: {dir: "a\\0b"}', "not a path"),
        ("checkpoint: {dir: ''}", "not a path"),
        ("checkpoint: {dir: ~nobody-here/x}", "checkpoint.dir=~nobody-here/x"),
        ("checkpoint: {dirr: x}", "dirr in the section checkpoint"),
        ("checkpoint: [1]", "must be a map of keys"),
        ("checkpoint: &a {dir: *a}", "YAML alias"),
        ("- 1", "must be a map of keys"),
        ("checkpoint: {", "is not valid YAML"),
        ("\0", "is not valid YAML"),
    ],
)
def test_a_hostile_run_yaml(checkpoints: Program, tmp_path: Path, text: str, says: str) -> None:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    run.config.write_text(text)
    for verb in ("list", "verify", "convert"):
        ran = checkpoints(verb, run.root, "--json")
        assert ran.code == 2 and says in ran.err, ran.err
        assert json.loads(ran.out)["exit_code"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_interpolation_is_not_followed(
    checkpoints: Program, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder, _ = kept
    monkeypatch.setenv("PLACE", str(folder.root.parent))
    run.config.write_text("workload: lm\ncheckpoint: {dir: '${oc.env:PLACE}'}\n")
    assert "${oc.env:PLACE}/run" in checkpoints("list", run.root).err.replace("\n", "")


def test_pickles_and_odd_files_are_no_checkpoints(checkpoints: Program, kept: Any) -> None:
    run, folder, _ = kept
    (folder.path(30) / "manifest.json").write_bytes(b"\x80\x04cposix\nsystem\n")
    (folder.root / "step_40").write_text("a file")
    (folder.root / "step_50").mkdir()
    shutil.copy(folder.path(10) / "manifest.json", folder.root / "step_50")
    ran = checkpoints("verify", run.root)
    assert ran.code == 1 and "step_40" not in ran.out
    assert "step_50 is damaged: its manifest.json was changed" in ran.out
    assert "the newest sound one is step_20" in ran.out


def test_odd_words_do_not_reach_the_terminal(checkpoints: Program, kept: Any) -> None:
    run, folder, _ = kept
    path = folder.path(30) / "state.json"
    body = json.loads(path.read_text()) | {"reason": "\x1b[31m[red]x", "saved_at": 1e300}
    path.write_text(json.dumps(body))
    files = Manifest.load(folder.path(30) / "manifest.json").files
    own = files["state.json"].model_copy(update={"num_bytes": path.stat().st_size})
    reseal(folder, 30, files=files | {"state.json": own})
    ran = checkpoints("list", run.root)
    assert ran.code == 0 and "\x1b" not in ran.out and "\\x1b[31m[red]x" in ran.out


def test_what_is_no_run_directory(checkpoints: Program, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in ("file", "nowhere", "."):
        for verb in ("list", "verify", "convert"):
            ran = checkpoints(verb, place)
            assert (ran.code, ran.out) == (4, "") and "is not a run directory" in ran.err


def test_checkpoints_that_are_a_file(checkpoints: Program, kept: Any) -> None:
    run, folder, _ = kept
    shutil.rmtree(folder.root)
    folder.root.write_text("x")
    for verb in ("list", "verify", "convert"):
        ran = checkpoints(verb, run.root)
        assert ran.code == 9 and "cannot be read" in ran.err


def test_the_program_itself(kept: Any, tmp_path: Path) -> None:
    run, folder, _ = kept
    flip_bit(folder.path(30) / "model-rank0.safetensors")
    assert paceline("checkpoints", "verify", "run", cwd=tmp_path).code == 1
    ran = paceline("checkpoints", "convert", "run", "best", "--out", "made", cwd=tmp_path)
    assert (ran.code, ran.err) == (0, "") and ran.out.startswith("made: step 20, paceline-lm\n")


def test_the_python_of_the_page_runs(
    checkpoints: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    run, tensors = make_run(tmp_path / "runs" / "latest", "lm_tiny", TINY_LM)
    keep(run, tensors, 10, num_ranks=2)
    assert checkpoints("convert", run.root, "--out", "my_model").code == 0
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, {})
    assert capsys.readouterr().out == f"{len(tensors)} tensors\n[64, 32]\n"
