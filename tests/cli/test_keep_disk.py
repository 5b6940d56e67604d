"""Faults F33 to F40, F45, F46a: disks that fill, files that change, settings that differ."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline import trust
from paceline.checkpoint.tensors import TensorFiles
from tests.cli.bench import Bench, finish
from tests.cli.keeping import (
    STEPS,
    flip_bit,
    folder,
    require_usable,
    resume,
    rows,
    samples,
    train,
)
from tests.saved import require_sound

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The same run, undisturbed: checkpoints of steps 5, 10 and 12."""
    bench = Bench(tmp_path_factory.mktemp("clean"))
    assert train(bench).code == 0
    yield bench


@pytest.fixture
def stopped(clean: Bench, bench: Bench) -> Bench:
    return cut_off(clean, bench)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A run without dropout, which depends on the number of ranks."""
    bench = Bench(tmp_path_factory.mktemp("plain"))
    assert train(bench, build="nn.Dropout = lambda p: nn.Identity()").code == 0
    yield bench


def cut_off(clean: Bench, bench: Bench) -> Bench:
    """A copy of that run as if it had been cut off after step 10."""
    trust.remember([Path(shutil.copy(clean.folder / "job.py", bench.folder))])
    shutil.copytree(clean.folder / "run", bench.folder / "run")
    launch = bench.folder / "run/launch.json"
    launch.write_text(launch.read_text().replace(str(clean.folder), str(bench.folder)))
    shutil.rmtree(folder(bench).path(STEPS))
    (bench.folder / "run/result.json").unlink()
    return bench


# The disk

# From step 8 on, once step 5 is safe, this rank's files may hold no more than 2 kB.
SMALL_FILES = """if step == 8 and RANK == '1':
                while not (HERE / 'run/checkpoints/latest').exists(): time.sleep(0.01)
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
"""


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_f33_f34_a_full_disk_ends_the_run_and_spares_what_was_good(
    mode: str, clean: Bench, bench: Bench
) -> None:
    ran = train(bench, f"checkpoint.mode={mode}", loss=SMALL_FILES)
    assert ran.code == 8, ran.err
    assert "step 10 could not be written" in ran.err and "File too large" in ran.err
    assert folder(bench).steps() == [5] and folder(bench).pointer("latest") == 5
    require_usable(bench)
    log = (bench.folder / "run/checkpoints.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in log[1:]] == ["5", "10"], (
        "no save after the one that failed"
    )
    (bench.folder / "job.py").write_text((clean.folder / "job.py").read_text())
    assert resume(bench, "--trust-code").code == 0 and rows(bench) == rows(clean)


def test_f33_on_request_the_run_trains_on_and_says_so(clean: Bench, bench: Bench) -> None:
    ran = train(bench, "checkpoint.on_error=continue", loss=SMALL_FILES)
    assert ran.code == 0 and "checkpoint of step 10 not written" in ran.err
    assert rows(bench) == rows(clean) and folder(bench).steps() == [5]
    log = (bench.folder / "run/checkpoints.csv").read_text()
    assert log.count(",failed,") == 2 and log.count(",ok,") == 1
    require_usable(bench)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_f33_a_file_system_that_is_too_small(bench: Bench) -> None:
    disk = bench.folder / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=96k tmpfs {disk}") != 0:
        pytest.skip("file systems cannot be mounted here")
    try:
        ran = train(bench, f"checkpoint.dir={disk}")
        assert ran.code == 8 and "No space left" in ran.err
        kept = folder(bench).__class__(disk / "run")
        for step in kept.steps():
            require_sound(kept, step)
        assert not [path for path in kept.root.iterdir() if path.name.startswith(".")]
    finally:
        os.system(f"umount {disk}")


def test_checkpoints_on_another_file_system(clean: Bench, bench: Bench) -> None:
    elsewhere = Path("/dev/shm") / bench.mark
    try:
        ran = train(bench, f"checkpoint.dir={elsewhere}", "train.steps=7")
        assert ran.code == 0 and (elsewhere / "run/step_7/manifest.json").is_file()
        ran = resume(bench, f"train.steps={STEPS}")
        assert ran.code == 0 and len(rows(bench)) == STEPS
        assert f"changed: train.steps: 7 -> {STEPS}" in ran.err
        # The same constant learning rate or not: the schedule knows the number of steps.
        assert [row[0] for row in rows(bench)] == [row[0] for row in rows(clean)]
    finally:
        shutil.rmtree(elsewhere, ignore_errors=True)


def test_two_runs_of_one_name_do_not_share_checkpoints(bench: Bench) -> None:
    keep = f"checkpoint.dir={bench.folder / 'kept'}"
    assert train(bench, keep, "train.steps=2").code == 0
    (bench.folder / "run").rename(bench.folder / "moved")
    ran = train(bench, keep, "train.steps=2")
    assert ran.code == 2 and "holds checkpoints up to step 2" in ran.err


def _as_file(root: Path) -> None:
    root.write_text("not a folder")


def _as_link(root: Path) -> None:
    (root.parent / "elsewhere").mkdir()
    root.symlink_to(root.parent / "elsewhere")


@pytest.mark.parametrize("spoil", [_as_file, _as_link])
def test_f40_a_place_that_cannot_be_written_is_found_before_ranks_start(
    spoil: Callable[[Path], None], stopped: Bench
) -> None:
    shutil.rmtree(folder(stopped).root)
    spoil(folder(stopped).root)
    ran = resume(stopped)
    assert ran.code == 3, ran.err
    assert "checkpoint.dir" in ran.err and "Traceback" not in ran.err


def test_f40_a_folder_that_vanishes_under_the_run(bench: Bench) -> None:
    gone = "shutil.rmtree(HERE / 'run/checkpoints') if step == 8 and RANK == '0' else None"
    ran = train(bench, loss=gone)
    assert ran.code == 8 and "No such file or directory" in ran.err
    ran = resume(bench)
    assert ran.code == 9 and "were written" in ran.err


# The files


def _truncate(step: Path) -> None:
    path = step / "optimizer-rank1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _edit_manifest(step: Path) -> None:
    path = step / "manifest.json"
    path.write_text(path.read_text().replace('"step": 10', '"step": 11'))


def _drop_file_from_manifest(step: Path) -> None:
    body = json.loads((step / "manifest.json").read_text())
    del body["files"]["model-rank1.safetensors"]
    (step / "manifest.json").write_text(json.dumps(body))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "f35_truncated": (_truncate, "optimizer-rank1.safetensors has"),
    "f35_missing": (lambda s: (s / "model-rank0.safetensors").unlink(), "is missing"),
    "f36_bit_in_weights": (lambda s: flip_bit(s / "model-rank1.safetensors", 0.9), "has changed"),
    "f36_bit_in_header": (lambda s: flip_bit(s / "model-rank1.safetensors", 0.1), "has changed"),
    "f36_bit_in_rng": (lambda s: flip_bit(s / "rng-rank0.safetensors"), "has changed"),
    "f36_bit_in_state": (lambda s: flip_bit(s / "state.json"), "has changed"),
    "f37_no_manifest": (lambda s: (s / "manifest.json").unlink(), "step_10 is incomplete"),
    "f37_edited_manifest": (_edit_manifest, "manifest.json was changed"),
    "f37_shortened_manifest": (_drop_file_from_manifest, "manifest.json was changed"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    name: str, clean: Bench, stopped: Bench
) -> None:
    damage, says = DAMAGES[name]
    damage(folder(stopped).path(10))
    ran = resume(stopped)
    assert ran.code == 0, ran.err
    assert says in ran.err and "step_5 was used instead" in ran.err
    assert rows(stopped) == rows(clean) and samples(stopped) == samples(clean)
    require_usable(stopped)


def test_where_none_is_sound_nothing_begins_anew(stopped: Bench) -> None:
    for step in folder(stopped).steps():
        flip_bit(folder(stopped).path(step) / "model-rank0.safetensors")
    before = (stopped.folder / "run/training.csv").read_text()
    ran = resume(stopped)
    assert ran.code == 9 and "can be trusted" in ran.err
    assert (stopped.folder / "run/training.csv").read_text() == before


class Hostile:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_f46a_a_pickle_is_refused_and_does_not_run(clean: Bench, stopped: Bench) -> None:
    proof = stopped.folder / "it-ran"
    payload = pickle.dumps(Hostile(proof))
    step = folder(stopped).path(10)
    (step / "model-rank0.safetensors").write_bytes(payload)
    (step / ".metadata").write_bytes(payload)
    (step / "rng-rank0.safetensors").write_bytes(payload)
    ran = resume(stopped)
    assert ran.code == 0 and "step_5 was used instead" in ran.err
    assert not proof.exists() and rows(stopped) == rows(clean)
    require_usable(stopped)


def test_f46a_not_even_with_the_right_sums(stopped: Bench) -> None:
    """Whoever can write the folder can make its sums agree: then the format itself refuses."""
    from paceline.checkpoint.folder import seal
    from paceline.checkpoint.tensors import sum_file

    proof, kept = stopped.folder / "it-ran", folder(stopped)
    for step in kept.steps():
        manifest = kept.manifest(step)
        for name in ("model-rank0.safetensors", "rng-rank0.safetensors"):
            (kept.path(step) / name).write_bytes(pickle.dumps(Hostile(proof)))
            manifest.files[name] = sum_file(kept.path(step) / name)
        seal(manifest).save(kept.path(step) / "manifest.json")
    ran = resume(stopped)
    assert ran.code == 9, ran.err
    assert not proof.exists()


# The settings

OTHERS = {
    "2 ranks to 1": ["launch.nproc=1"],
    "2 ranks to 4": ["launch.nproc=4", "train.micro_batch_size=2", "--allow-change"],
    "ddp to zero3": ["strategy.name=zero3"],
    "ddp to zero1": ["strategy.name=zero1"],
    "ddp to zero2 on 4": [
        "strategy.name=zero2", "launch.nproc=4", "train.micro_batch_size=2", "--allow-change",
    ],
    "loaders": ["data.num_workers=2"],
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_f38_the_same_samples_and_losses_on_other_ranks_and_strategies(
    name: str, plain: Bench, bench: Bench
) -> None:
    stopped, clean = cut_off(plain, bench), plain
    ran = resume(stopped, *OTHERS[name])
    assert ran.code == 0, ran.err
    assert samples(stopped) == samples(clean), "none lost, none taken twice"
    assert sorted(index for ids in samples(stopped).values() for index in ids) == list(range(96))
    losses = [[float(row[1]) for row in rows(one)] for one in (stopped, clean)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "changed: " in ran.err
    require_usable(stopped)


def test_f38_ranks_among_which_the_batch_cannot_be_divided(stopped: Bench) -> None:
    ran = resume(stopped, "launch.nproc=3")
    assert ran.code == 2 and "global_batch_size" in ran.err


def test_f39_what_changes_the_training_must_be_allowed(stopped: Bench) -> None:
    ran = resume(stopped, "optim.lr=0.5")
    assert ran.code == 2 and "optim.lr: 0.01 -> 0.5" in ran.err and "--allow-change" in ran.err
    ran = resume(stopped, "optim.lr=0.5", "--allow-change")
    assert ran.code == 0 and "changed: optim.lr: 0.01 -> 0.5" in ran.err


def test_f39_another_model_is_refused_whatever_is_allowed(stopped: Bench) -> None:
    job = stopped.folder / "job.py"
    narrow = job.read_text().replace("Linear(4, 64)", "Linear(4, 32)")
    job.write_text(narrow.replace("Linear(64, 1)", "Linear(32, 1)"))
    ran = resume(stopped, "--allow-change", "--trust-code")
    assert ran.code == 2, ran.err
    assert "0.weight: [64, 4] in the checkpoint, [32, 4] in the model" in ran.err


def test_other_data_must_be_allowed(stopped: Bench) -> None:
    job = stopped.folder / "job.py"
    job.write_text(job.read_text().replace('fingerprint = "numbers"', 'fingerprint = "others"'))
    ran = resume(stopped)
    assert ran.code == 2 and "job.py (SHA-256 " in ran.err and "--trust-code" in ran.err
    ran = resume(stopped, "--trust-code")
    assert ran.code == 4 and "fingerprint numbers -> others" in ran.err
    assert resume(stopped, "--allow-change").code == 0


def test_a_run_that_was_cut_off_after_its_last_step(clean: Bench, stopped: Bench) -> None:
    """All steps are taken and kept; only the result is missing."""
    shutil.copytree(folder(clean).path(STEPS), folder(stopped).path(STEPS))
    ran = resume(stopped)
    assert ran.code == 0, ran.err
    assert rows(stopped) == rows(clean) and stopped.result()["steps"] == STEPS


def test_a_run_that_is_over_has_nothing_to_do(clean: Bench) -> None:
    before = (clean.folder / "run/training.csv").read_text()
    ran = resume(clean)
    assert ran.code == 0 and "nothing to do" in ran.err
    assert (clean.folder / "run/training.csv").read_text() == before


def test_code_that_came_with_the_directory_is_not_run(stopped: Bench) -> None:
    shutil.copy(stopped.folder / "job.py", stopped.folder / "run/job.py")
    launch = stopped.folder / "run/launch.json"
    launch.write_text(launch.read_text().replace("/job.py:Job", "/run/job.py:Job"))
    ran = resume(stopped)
    assert ran.code == 2 and "lies inside the run directory" in ran.err


def test_f45_no_checkpoint_holds_a_nan(bench: Bench) -> None:
    bad = "batch = batch * float('nan') if step == 10 and RANK == '1' else batch"
    ran = train(bench, "checkpoint.every=1", "checkpoint.keep=20", loss=bad)
    assert ran.code == 7, ran.err
    result = bench.result()
    assert result["bad_step"] == 10 and result["bad_sample_ids"]
    kept = folder(bench)
    assert kept.steps()[0] == 9, "no checkpoint of the step that was vetoed"
    for step in kept.steps():
        source = TensorFiles(kept.path(step), require_sound(kept, step))
        for section in ("model", "optimizer"):
            for name, shape in source.shapes(section).items():
                assert torch.isfinite(source.rows(section, name, 0, (*shape, 1)[0])).all()
    again = finish(bench.start("train", "--resume", "run"))
    assert again.code == 7, "the same samples give the same NaN"


def test_a_resume_that_takes_no_step_leaves_the_run_as_it_was(stopped: Bench) -> None:
    """Its settings were written for ranks that then refused."""
    job = stopped.folder / "job.py"
    whole = job.read_text()
    job.write_text(
        whole.replace("Linear(4, 64)", "Linear(4, 32)").replace("Linear(64", "Linear(32")
    )
    assert resume(stopped, "optim.lr=0.5", "--allow-change", "--trust-code").code == 2
    job.write_text(whole)
    ran = resume(stopped)
    assert ran.code == 0 and "lr: 0.01" in (stopped.folder / "run/run.yaml").read_text()


def test_a_validation_loss_that_is_no_number_does_not_stop_checkpoints(bench: Bench) -> None:
    bad = "batch = batch * float('nan') if is_eval else batch"
    ran = train(bench, "train.eval_every=5", loss=bad)
    assert ran.code == 0, ran.err
    assert folder(bench).steps() == [12, 10, 5] and folder(bench).state(10).best is None
