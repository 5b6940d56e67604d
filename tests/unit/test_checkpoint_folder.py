"""A checkpoint's folder: whole or absent, believed only as far as its checksums reach."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint.folder import BEST, LATEST, MANIFEST, CheckpointFolder, Retention, seal
from paceline.checkpoint.pieces import SECTIONS, Piece
from paceline.checkpoint.restore import choose_checkpoint
from paceline.checkpoint.tensors import TensorFiles, sum_file, write_pieces
from paceline.errors import RestoreError
from paceline.records import BestMetric
from tests.harness import alone, make_kept
from tests.saved import QUICK, build_saver, read, require_sound, save, some_pieces, weight_of

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Checkpoints of steps 1 and 2."""
    saver = build_saver(tmp_path / "checkpoints")
    save(saver, 1)
    save(saver, 2)
    assert saver.failure is None and not saver.notes
    return saver.writer.folder


def reseal(folder: CheckpointFolder, step: int, **changes: object) -> None:
    """As somebody would who knows how it is done: with a seal that is right."""
    manifest = folder.manifest(step).model_copy(update=changes)
    seal(manifest).save(folder.path(step) / MANIFEST)


# How they come and go


def test_what_was_saved_is_there(folder: CheckpointFolder) -> None:
    assert folder.steps() == [2, 1] and folder.pointer(LATEST) == 2 and folder.pointer(BEST) is None
    assert torch.equal(read(folder, 2), some_pieces(2)[0].value)
    assert folder.state(2).step == 2
    assert {path.name for path in folder.path(2).iterdir()} == {
        "model-rank0.safetensors", "optimizer-rank0.safetensors", "rng-rank0.safetensors",
        "state.json", MANIFEST,
    }  # fmt: skip
    log = (folder.root.parent / "checkpoints.csv").read_text().splitlines()
    assert len(log) == 3 and all(",ok," in row for row in log[1:])


def test_a_step_saved_again_takes_the_place_of_the_first(folder: CheckpointFolder) -> None:
    """In one attempt too: the words of the first save are not heard again."""
    saver = build_saver(folder.root)
    save(saver, 3)
    saver.save(make_kept(3), some_pieces(30), {})
    saver.wait()
    assert saver.failure is None
    assert torch.equal(read(folder, 3), some_pieces(30)[0].value)
    assert not [path.name for path in folder.root.iterdir() if path.name.startswith(".")]


def test_old_ones_go_and_the_best_stays(tmp_path: Path) -> None:
    saver = build_saver(tmp_path / "checkpoints")
    for step in range(1, 7):
        save(saver, step, BestMetric(step=2, value=1.0) if step >= 2 else None)
    folder = saver.writer.folder
    assert folder.steps() == [6, 5, 2]
    assert (folder.pointer(LATEST), folder.pointer(BEST)) == (6, 2)


def test_a_damaged_one_does_not_count_as_kept(folder: CheckpointFolder) -> None:
    flip(folder.path(2) / "model-rank0.safetensors", -1)
    saver = build_saver(folder.root)
    save(saver, 3)
    assert folder.steps() == [3, 2, 1], "1 is the only other good one"
    assert "step_2/model-rank0.safetensors has changed" in saver.notes[0]
    save(saver, 4)
    assert folder.steps() == [4, 3]


def test_nothing_goes_when_the_newest_cannot_be_read_back(folder: CheckpointFolder) -> None:
    flip(folder.path(2) / "model-rank0.safetensors", -1)
    damages = Retention(folder, keep=2).prune(newest=2)
    assert folder.steps() == [2, 1] and len(damages) == 1


def test_a_sweep_removes_what_a_kill_left(folder: CheckpointFolder) -> None:
    (folder.temporary(3, 1)).mkdir()
    (folder.temporary(3, 1) / "model-rank0.safetensors").write_bytes(b"half")
    assert folder.sweep() == [".tmp-step_3-1"]
    assert sorted(path.name for path in folder.root.iterdir()) == ["latest", "step_1", "step_2"]
    assert CheckpointFolder(folder.root / "absent").sweep() == []


def test_a_kill_between_two_renames_loses_nothing(folder: CheckpointFolder) -> None:
    """Step 2 was moved away to be replaced, and its successor never came."""
    os.rename(folder.path(2), folder.root / ".old-step_2")
    folder.sweep()
    assert folder.steps() == [2, 1] and torch.equal(read(folder, 2), some_pieces(2)[0].value)
    shutil.copytree(folder.path(2), folder.root / ".old-step_2")
    folder.sweep()
    assert folder.steps() == [2, 1] and not (folder.root / ".old-step_2").exists()


def test_names_that_are_none_of_ours(folder: CheckpointFolder, tmp_path: Path) -> None:
    for name in ("step_", "step_03", "step_-1", "step_1e3", "step_٣", f"step_{10**30}", "x"):
        (folder.root / name).mkdir()
    (folder.root / "step_9").symlink_to(folder.path(1))
    (folder.root / "step_8").write_text("a file")
    assert folder.steps() == [2, 1]
    (folder.root / LATEST).write_bytes(b"\xff\xfe")
    assert folder.pointer(LATEST) is None
    assert CheckpointFolder(tmp_path / "absent").steps() == []


# What is believed


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@settings(QUICK, max_examples=60)
@given(data=st.data())
def test_any_bit_that_flips_is_seen(folder: CheckpointFolder, data: st.DataObject) -> None:
    """Headers, tensors, generators, state and the manifest itself."""
    path = data.draw(st.sampled_from(sorted(folder.path(2).iterdir())))
    kept = path.read_bytes()
    at, bit = data.draw(st.integers(0, len(kept) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(kept)
    changed[at] ^= 1 << bit
    path.write_bytes(changed)
    try:
        with pytest.raises(RestoreError, match="step_2"):
            require_sound(folder, 2)
    except pytest.fail.Exception:
        # White space between two words of the manifest means nothing.
        assert path.name == MANIFEST and json.loads(changed) == json.loads(kept)
    finally:
        path.write_bytes(kept)
    require_sound(folder, 2)


@settings(QUICK, max_examples=30)
@given(data=st.data())
def test_any_cut_is_seen(folder: CheckpointFolder, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(folder.path(2).iterdir())))
    kept = path.read_bytes()
    length = data.draw(st.integers(0, len(kept) - 2))  # the last byte of the manifest is a newline
    path.write_bytes(kept[:length])
    with pytest.raises(RestoreError, match="step_2"):
        require_sound(folder, 2)
    path.write_bytes(kept)


def test_an_edited_manifest_is_refused(folder: CheckpointFolder) -> None:
    """What no file's checksum covers: where a tensor stands, and which step this is."""
    path = folder.path(2) / MANIFEST
    body = json.loads(path.read_text())
    body["model"]["weight"]["parts"][0]["row"] = 1
    path.write_text(json.dumps(body))
    with pytest.raises(RestoreError, match=r"step_2 is damaged: its manifest\.json was changed"):
        folder.manifest(2)
    shutil.rmtree(folder.path(2))
    shutil.copytree(folder.path(1), folder.path(2))
    with pytest.raises(RestoreError, match=r"step_2 is damaged: its manifest\.json was changed"):
        folder.manifest(2)


def test_b10_a_manifest_that_is_no_plain_file_is_refused_at_once(folder: CheckpointFolder) -> None:
    """A FIFO has no writer: to open it would be to wait without end."""
    path = folder.path(2) / MANIFEST
    elsewhere = path.rename(folder.root.parent / "elsewhere.json")
    path.symlink_to(elsewhere)
    with pytest.raises(RestoreError, match="is a link"):
        folder.manifest(2)
    for make, says in ((os.mkfifo, "not a plain file"), (os.mkdir, "not a plain file")):
        path.unlink()
        make(path)
        with pytest.raises(RestoreError, match=says):
            folder.manifest(2)
    (folder.root / LATEST).unlink()
    os.mkfifo(folder.root / LATEST)
    assert folder.pointer(LATEST) is None


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "."}, {"shape": [-1, 3]}, {"shape": [10**30]}, {"shape": [2**40, 2**40]},
        {"shape": [4, 3, 0, 2**62]}, {"shape": [2**33]}, {"parts": {"row": -1}},
        {"parts": {"offset": -8}}, {"parts": {"num_rows": -4}}, {"parts": {"num_rows": 2**62}},
    ],
)  # fmt: skip
def test_b10_a_tensor_that_cannot_be_is_refused(
    folder: CheckpointFolder, change: dict[str, object]
) -> None:
    model = folder.manifest(2).model
    if isinstance(parts := change.get("parts"), dict):
        change = {"parts": [model["weight"].parts[0].model_copy(update=parts)]}
    reseal(folder, 2, model={**model, "weight": model["weight"].model_copy(update=change)})
    with pytest.raises(RestoreError, match="'weight' has a shape or type that no tensor has"):
        folder.manifest(2)


def test_a_missing_file_is_named(folder: CheckpointFolder) -> None:
    (folder.path(2) / "state.json").unlink()
    with pytest.raises(RestoreError, match="step_2/state.json is missing"):
        require_sound(folder, 2)
    (folder.path(1) / MANIFEST).unlink()
    with pytest.raises(RestoreError, match="step_1 is incomplete"):
        require_sound(folder, 1)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".hidden", "", "a\n"])
def test_a_hostile_name_is_refused(folder: CheckpointFolder, name: str) -> None:
    """Among the files, and where a tensor says which file it is in."""
    manifest = folder.manifest(2)
    files = {**manifest.files, name: manifest.files["state.json"]}
    reseal(folder, 2, files=files)
    with pytest.raises(RestoreError, match="not a name of a file of ours"):
        folder.manifest(2)
    entry = manifest.model["weight"]
    part = entry.parts[0].model_copy(update={"file": name})
    model = {**manifest.model, "weight": entry.model_copy(update={"parts": [part]})}
    seal(manifest.model_copy(update={"model": model})).save(folder.path(2) / MANIFEST)
    with pytest.raises(RestoreError, match="no checksum for"):
        folder.manifest(2)


def test_a_state_without_checksum_is_refused(folder: CheckpointFolder) -> None:
    files = {n: s for n, s in folder.manifest(2).files.items() if n != "state.json"}
    reseal(folder, 2, files=files)
    with pytest.raises(RestoreError, match=r"no checksum for 'state\.json'"):
        folder.manifest(2)


def test_a_link_in_place_of_a_file_is_refused(folder: CheckpointFolder) -> None:
    path = folder.path(2) / "state.json"
    path.unlink()
    path.symlink_to(folder.path(1) / "state.json")
    with pytest.raises(RestoreError, match="state.json is missing"):
        require_sound(folder, 2)


class Bomb:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_is_refused_and_does_not_run(folder: CheckpointFolder, tmp_path: Path) -> None:
    """Even where its checksum is right."""
    path, mark = folder.path(2) / "model-rank0.safetensors", tmp_path / "mark"
    for content in (pickle.dumps(Bomb(mark)), _torch_file(Bomb(mark), tmp_path)):
        path.write_bytes(content)
        with pytest.raises(RestoreError, match="model-rank0.safetensors has"):
            require_sound(folder, 2)
        _accept(folder, path)
        with pytest.raises(RestoreError, match="model-rank0.safetensors has changed"):
            read(folder, 2)
    assert not mark.exists()


def _torch_file(value: object, tmp_path: Path) -> bytes:
    torch.save(value, tmp_path / "value.pt")
    return (tmp_path / "value.pt").read_bytes()


def _accept(folder: CheckpointFolder, path: Path) -> None:
    files = {**folder.manifest(2).files, path.name: sum_file(path)}
    reseal(folder, 2, files=files)


@pytest.mark.parametrize("length", [2**63 - 1, 2**40, 2**32])
def test_a_header_of_absurd_length_is_seen_and_never_followed(
    folder: CheckpointFolder, length: int
) -> None:
    path = folder.path(2) / "model-rank0.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    manifest = folder.manifest(2)
    assert "header is damaged" in folder.misfits(2, manifest, manifest.files)[0]
    with pytest.raises(RestoreError, match="header is damaged"):
        require_sound(folder, 2)
    _accept(folder, path)
    assert torch.equal(read(folder, 2), some_pieces(2)[0].value)


def test_a_part_that_cannot_be_in_its_file_takes_no_memory(folder: CheckpointFolder) -> None:
    manifest = folder.manifest(2)
    entry = manifest.model["weight"]
    part = entry.parts[0].model_copy(update={"num_rows": 10**15})
    model = {**manifest.model, "weight": entry.model_copy(update={"parts": [part]})}
    files = TensorFiles(folder.path(2), manifest.model_copy(update={"model": model}))
    with pytest.raises(RestoreError, match="would not fit"):
        weight_of(files)


def test_a_manifest_nested_without_end_is_refused(folder: CheckpointFolder) -> None:
    for name in (MANIFEST, "state.json"):
        path = folder.path(2) / name
        path.write_text("[" * 200_000)
    with pytest.raises(RestoreError, match="step_2 is incomplete"):
        require_sound(folder, 2)


def test_a_tensor_of_another_shape_is_not_stretched(folder: CheckpointFolder) -> None:
    """Four rows of one number would fit four rows of three, if nobody looked."""
    path = folder.path(2) / "model-rank0.safetensors"
    narrow = Piece("model", "weight", (4, 1), 0, torch.ones(4, 1), (0,))
    write_pieces(path, [narrow, some_pieces(2)[1]])
    _accept(folder, path)
    with pytest.raises(RestoreError, match="has changed"):
        read(folder, 2)


@pytest.mark.parametrize("rows", [(0, 3), (1, 4), (0, 5), (-1, 4)])
def test_rows_that_are_missing_or_too_many(folder: CheckpointFolder, rows: tuple[int, int]) -> None:
    manifest = folder.manifest(2)
    entry = manifest.model["weight"]
    part = entry.parts[0].model_copy(update={"row": rows[0], "num_rows": rows[1] - rows[0]})
    model = {**manifest.model, "weight": entry.model_copy(update={"parts": [part]})}
    changed = manifest.model_copy(update={"model": model})
    files = TensorFiles(folder.path(2), changed)
    with pytest.raises(RestoreError):
        weight_of(files)


# How ranks choose


def read_all(source: TensorFiles) -> None:
    """As an engine does that holds everything."""
    for section in SECTIONS:
        for name, shape in source.shapes(section).items():
            source.rows(section, name, 0, (*shape, 1)[0])


def test_the_newest_sound_one_is_used_and_the_damage_told(folder: CheckpointFolder) -> None:
    flip(folder.path(2) / "model-rank0.safetensors", -1)
    with alone():
        found = choose_checkpoint(folder, CPU, read_all)
    assert found is not None and found.kept.step == 1
    assert "step_2/model-rank0.safetensors has changed" in found.damages[0]


def test_where_none_is_sound_nothing_is_used(folder: CheckpointFolder) -> None:
    for step in (1, 2):
        flip(folder.path(step) / "state.json", 5)
    with alone(), pytest.raises(RestoreError, match="no checkpoint in .* can be trusted") as told:
        choose_checkpoint(folder, CPU, read_all)
    assert "step_1/state.json" in str(told.value) and "step_2/state.json" in str(told.value)


def test_where_there_never_was_one(tmp_path: Path) -> None:
    with alone():
        assert choose_checkpoint(CheckpointFolder(tmp_path / "absent"), CPU, read_all) is None


def test_a_state_nested_without_end_is_passed_over(folder: CheckpointFolder) -> None:
    path = folder.path(2) / "state.json"
    path.write_text("[" * 200_000)
    _accept(folder, path)
    with alone():
        found = choose_checkpoint(folder, CPU, read_all)
    assert found is not None and found.kept.step == 1


@pytest.mark.parametrize("head_bytes", [-5, 10**6, 2**70])
def test_a_head_is_a_part_of_its_file(folder: CheckpointFolder, head_bytes: int) -> None:
    files = folder.manifest(2).files
    name = next(name for name in files if name.startswith("model"))
    other = files[name].model_copy(update={"head_bytes": head_bytes})
    reseal(folder, 2, files={**files, name: other})
    with pytest.raises(RestoreError, match="head_bytes"):
        folder.manifest(2)
