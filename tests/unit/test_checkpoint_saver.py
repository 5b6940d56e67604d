"""What goes wrong while a checkpoint is saved, which bytes are written, and by whom."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from paceline.checkpoint.folder import LATEST, CheckpointFolder
from paceline.checkpoint.pieces import Piece, own_pieces
from paceline.checkpoint.tensors import TensorFiles, write_pieces
from paceline.errors import ClusterError
from paceline.records import Manifest
from tests.harness import make_kept
from tests.saved import (
    QUICK,
    build_saver,
    build_savers,
    read,
    save,
    some_pieces,
)

ROOT = Path(__file__).parents[2]

FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from tests.harness import make_kept
from tests.saved import build_saver, save, some_pieces
from paceline.checkpoint.pieces import Piece

saver = build_saver(Path(sys.argv[1]))
save(saver, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
large = Piece("model", "large", (100_000,), 0, torch.ones(100_000), (0,))
saver.save(make_kept(2), [*some_pieces(2), large], {})
saver.wait()
print(saver.failure)
"""


def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(root)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip
    assert "the checkpoint of step 2 could not be written: rank 0: File too large" in done.stdout
    assert "hint: free space there or set checkpoint.dir" in done.stdout
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step_1"]
    folder = CheckpointFolder(root)
    assert folder.pointer(LATEST) == 1
    assert torch.equal(read(folder, 1), some_pieces(1)[0].value)
    log = (tmp_path / "checkpoints.csv").read_text().splitlines()
    assert ",failed," in log[-1] and "File too large" in log[-1]


def test_what_no_file_can_hold_is_a_failed_save(tmp_path: Path) -> None:
    """Not foreseen, and reported all the same: the other ranks wait for a word."""
    saver = build_saver(tmp_path / "checkpoints")
    odd = Piece("model", "complex", (2,), 0, torch.ones(2, dtype=torch.complex64), (0,))
    saver.save(make_kept(1), [odd], {})
    saver.wait()
    assert "rank 0: KeyError" in str(saver.failure)
    assert not list((tmp_path / "checkpoints").iterdir())
    save(saver, 2)
    assert saver.failure is None


def test_ranks_write_one_together_and_wait_for_each_other(tmp_path: Path) -> None:
    """Also when a step is saved again: the answer to the first save is not heard twice."""
    first, second = build_savers(tmp_path / "checkpoints", 2, "async")
    for _ in range(2):
        second.save(make_kept(1), [_rows(2, torch.ones(2, 3))], {})
        time.sleep(0.2)
        assert second._save and not second._save.is_written.is_set(), "rank 0 has not written yet"
        first.save(make_kept(1), [_rows(0, torch.zeros(2, 3))], {})
        for saver in (first, second):
            saver.wait()
            assert saver.failure is None and not saver.notes
    folder = first.writer.folder
    assert torch.equal(read(folder, 1), torch.cat([torch.zeros(2, 3), torch.ones(2, 3)]))
    assert first.writer.store.num_keys() <= 1


def _rows(row: int, value: torch.Tensor) -> Piece:
    return Piece("model", "weight", (4, 3), row, value, (row // 2,))


def test_one_rank_fails_and_all_know_why(tmp_path: Path) -> None:
    first, second = build_savers(tmp_path / "checkpoints", 2, "async")
    second.save(make_kept(1), [_rows(2, torch.ones(2, 3, dtype=torch.complex64))], {})
    first.save(make_kept(1), [_rows(0, torch.zeros(2, 3))], {})
    for saver in (first, second):
        saver.wait()
        assert "rank 1: KeyError" in str(saver.failure)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_training_goes_on_while_a_captured_state_is_written(tmp_path: Path) -> None:
    """What is written is the state at the save, whatever became of it since."""
    first, second = build_savers(tmp_path / "checkpoints", 2, "async")
    held = torch.zeros(2, 3)
    first.save(make_kept(1), [_rows(0, held)], {})
    held.fill_(7.0)
    second.save(make_kept(1), [_rows(2, torch.ones(2, 3))], {})
    first.wait()
    second.wait()
    assert torch.equal(read(first.writer.folder, 1)[:2], torch.zeros(2, 3))


def test_all_is_on_disk_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the rename must not leave a checkpoint with holes: every file, manifest and
    the folder itself are synced before; the folder that holds the name, after."""
    synced: list[int] = []
    renamed: list[tuple[set[str], set[str]]] = []  # files, and those of them that were not synced
    sync, rename = os.fsync, os.rename

    def noted_sync(handle: int) -> None:
        synced.append(os.fstat(handle).st_ino)
        sync(handle)

    def noted_rename(old: Path, new: Path) -> None:
        late = {path.name for path in (old, *old.iterdir()) if path.stat().st_ino not in synced}
        renamed.append(({path.name for path in old.iterdir()}, late))
        synced.clear()
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "rename", noted_rename)
    saver = build_saver(tmp_path / "checkpoints")
    save(saver, 1)
    assert saver.failure is None
    ((names, late),) = renamed
    assert {"model-rank0.safetensors", "state.json", "manifest.json"} <= names
    assert not late, "not synced before the rename"
    assert (tmp_path / "checkpoints").stat().st_ino in synced


def test_nothing_of_a_save_stays_in_the_store(tmp_path: Path) -> None:
    saver = build_saver(tmp_path / "checkpoints")
    for step in range(1, 4):
        save(saver, step)
    assert saver.writer.store.num_keys() <= 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_told_before_ranks_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ClusterError, match="checkpoints cannot be written"):
            CheckpointFolder(tmp_path / "checkpoints").require_writable()
    finally:
        tmp_path.chmod(0o700)


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ClusterError, match="is a link to"):
        CheckpointFolder(tmp_path / "link").require_writable()
    CheckpointFolder(tmp_path / "deep" / "checkpoints").require_writable()
    assert list((tmp_path / "deep" / "checkpoints").iterdir()) == []


DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


@settings(QUICK, max_examples=40)
@given(data=st.data())
def test_any_tensors_are_read_as_they_were_written(tmp_path: Path, data: st.DataObject) -> None:
    """By us and by safetensors itself: any type, no axes, no elements, not contiguous."""
    shapes = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5))
    pieces = []
    for number, shape in enumerate(shapes):
        dtype = data.draw(st.sampled_from(DTYPES))
        value = (torch.randn(shape) * 9).to(dtype)
        value = value.T if value.dim() == 2 else value
        pieces.append(Piece("model", f"t{number}", tuple(value.shape), 0, value, (0,)))
    path = tmp_path / "model-rank0.safetensors"
    written = write_pieces(path, pieces)
    assert written.sum.num_bytes == path.stat().st_size
    manifest = Manifest(step=1, files={path.name: written.sum}, model=written.tensors, optimizer={})
    ours, theirs = TensorFiles(tmp_path, manifest), load_file(path)
    for piece in pieces:
        rows = ours.rows("model", piece.name, 0, (*piece.shape, 1)[0])
        for found in (rows, theirs[piece.name]):
            assert (found.dtype, tuple(found.shape)) == (piece.value.dtype, piece.shape)
            assert _bits(found) == _bits(piece.value)


def _bits(value: torch.Tensor) -> bytes:
    return bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy())


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    num_ranks=st.integers(1, 9),
    first_only=st.booleans(),
)
def test_each_piece_has_one_writer_and_shares_are_fair(
    sizes: list[int], num_ranks: int, first_only: bool
) -> None:
    """The largest first, to whoever has least: nobody has more than a fair share and one piece."""
    holders = tuple(range(num_ranks))
    pieces = [
        Piece("model", f"t{n}", (size,), 0, torch.empty(size, dtype=torch.uint8), holders)
        for n, size in enumerate(sizes)
    ]
    shares = [own_pieces(pieces, rank, first_only) for rank in holders]
    written = [piece.name for share in shares for piece in share]
    assert sorted(written) == sorted(piece.name for piece in pieces)
    if first_only:
        assert len(shares[0]) == len(pieces)
        return
    most = max(sum(piece.num_bytes for piece in share) for share in shares)
    assert most <= sum(sizes) / num_ranks + max(sizes)
