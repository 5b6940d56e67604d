"""Images by index: folders, lists, tars and parquet files give the same samples, a crop depends on
the position alone, and what cannot be read is named."""

import io
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from paceline.data.cursor import EvenPicks, Order, StepSlice
from paceline.data.image_index import ImageIndex
from paceline.data.images import ImageData, Images, centre_box, prepare_images, random_box
from paceline.data.loader import LoaderPlan, Microbatches, MicrobatchSource, Rules
from paceline.errors import ConfigError, DataError
from paceline.job import load_job
from tests.machines import plan

PIL = pytest.importorskip("PIL.Image")
SIZE, NUM = 16, 24
NAMES = [f"{'cat' if n % 2 else 'dog'}/{n:02d}.png" for n in range(NUM)]


def png(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (30, 20 + number, 3), dtype=np.uint8)
    kept = io.BytesIO()
    PIL.fromarray(pixels).save(kept, "png")
    return kept.getvalue()


CONTENT = {name: png(number) for number, name in enumerate(NAMES)}


def make_folder(root: Path) -> Path:
    for name, raw in CONTENT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(raw)
    return root


def make_list(root: Path) -> Path:
    make_folder(root / "images")
    rows = [f"images/{name},{n % 2}" for n, name in enumerate(NAMES)]
    (root / "list.csv").write_text("\n".join(["path,label", *rows, ""]))
    return root / "list.csv"


def add(tar: tarfile.TarFile, name: str, raw: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(raw)
    tar.addfile(member, io.BytesIO(raw))


def make_tars(root: Path) -> Path:
    """Two shards; the label comes before the image in one half, and after it in the other."""
    root.mkdir(parents=True)
    for shard in range(2):
        with tarfile.open(root / f"{shard}.tar", "w") as tar:
            for number in range(shard * 12, shard * 12 + 12):
                parts = [("png", CONTENT[NAMES[number]]), ("cls", f"{number % 2}\n".encode())]
                for suffix, raw in parts if shard else reversed(parts):
                    add(tar, f"a/{number:02d}.{suffix}", raw)
                add(tar, f"a/{number:02d}.seg.png", b"another thing of the same sample")
    return root


def make_parquet(root: Path) -> Path:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    root.mkdir(parents=True)
    for shard in range(2):
        numbers = range(shard * 12, shard * 12 + 12)
        rows = [{"bytes": CONTENT[NAMES[n]], "path": NAMES[n]} for n in numbers]
        table = arrow.table({"image": rows, "label": [n % 2 for n in numbers]})
        parquet.write_table(table, root / f"{shard}.parquet", row_group_size=5)
    return root


MAKERS = {"folder": make_folder, "list": make_list, "tar": make_tars, "parquet": make_parquet}


@pytest.fixture(params=MAKERS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MAKERS[request.param](tmp_path / "source")


def keys(tmp_path: Path, path: Path, **more: Any) -> ImageData:
    return ImageData(path_train=str(path), cache_dir=str(tmp_path / "cache"), **more)


def open_images(tmp_path: Path, path: Path, split: Any = "val", **more: Any) -> Images:
    more = {"path_eval": str(path)} | more
    return Images(keys(tmp_path, path, **more), split, SIZE)


def test_each_kind_of_source_gives_the_same_samples(source: Path, tmp_path: Path) -> None:
    found = open_images(tmp_path, source)
    wanted = open_images(tmp_path, make_folder(tmp_path / "plain"))
    # A folder sorts by class; others are in the order of their rows.
    order = {name: place for place, name in enumerate(sorted(NAMES))}
    by_class = source.is_dir() and any(source.glob("cat"))
    assert len(found) == NUM
    for number in (0, 13, 7, NUM - 1, 13):  # in any order, and again
        name = sorted(NAMES)[number] if by_class else NAMES[number]
        sample = found[number]
        assert torch.equal(sample["pixels"], wanted[order[name]]["pixels"]), name
        assert sample["label"] == (int(name[4:6]) + (1 if by_class else 0)) % 2


def test_the_second_time_nothing_is_listed(source: Path, tmp_path: Path) -> None:
    said: list[str] = []
    data = keys(tmp_path, source, val_fraction=0.3)
    first = prepare_images(data, said.append)
    assert "24 images" in said[-1]
    assert prepare_images(data, lambda text: pytest.fail(text)) == first
    index = ImageIndex(Path(first["images_train"]))
    assert first["num_images"] == len(index) == NUM
    # Ranks are given the list, and need not look at the source again to open it.
    gone = data.model_copy(update={"path_train": "gone"})
    assert 0 < len(Images(gone, "train", SIZE, prepared=first)) < NUM
    assert not list((tmp_path / "cache" / "images").glob(".*"))


def test_a_job_without_a_source_is_told_which_key_names_one() -> None:
    with pytest.raises(ConfigError, match=r"data.path_train is not set"):
        Images(ImageData(), "train", SIZE)


def test_a_changed_file_makes_another_list(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "source")
    first = prepare_images(keys(tmp_path, folder), lambda text: None)
    (folder / NAMES[3]).write_bytes(png(99) + b"0")
    assert prepare_images(keys(tmp_path, folder), lambda text: None) != first


def test_a_split_follows_from_names_alone(source: Path, tmp_path: Path) -> None:
    train, val = (
        open_images(tmp_path, source, split, path_eval="auto", val_fraction=0.3)
        for split in ("train", "val")
    )
    assert sorted([*train.ids, *val.ids]) == list(range(NUM)) and 0 < len(val) < NUM / 2
    if train.index.source.kind != "files" or source.suffix:
        return
    before = {val.index.place(n).name for n in val.ids}
    for number in range(100, 120):
        (source / f"cat/{number}.png").write_bytes(png(5))
    more = open_images(tmp_path, source, "val", path_eval="auto", val_fraction=0.3)
    after = {more.index.place(n).name for n in more.ids}
    assert before == {name for name in after if name in NAMES} and len(after) > len(before)


def test_an_empty_split_is_refused_with_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="falls to val with data.val_fraction=0"):
        folder = make_folder(tmp_path / "source")
        open_images(tmp_path, folder, "val", path_eval="auto", val_fraction=0.0)


def loaded(data: Any, own: StepSlice) -> MicrobatchSource:
    rules = Rules(None, 1)  # type: ignore[arg-type]
    return MicrobatchSource(data, EvenPicks(Order(len(data), 3), own), rules)


def batches(data: Any, micro: int, dp: int, num_steps: int) -> dict[int, torch.Tensor]:
    """Pixels by position of the run, from all ranks."""
    found = {}
    for rank in range(dp):
        own = StepSlice(micro, 1, dp, rank)
        source = loaded(data, own)
        for step in range(num_steps):
            places = own.positions(step).tolist()
            found |= dict(zip(places, source[step].batch["pixels"], strict=True))
    return found


def test_a_crop_depends_on_the_position_alone(tmp_path: Path) -> None:
    data = open_images(tmp_path, make_folder(tmp_path / "source"), "train")
    alone, shared = batches(data, 6, 1, 8), batches(data, 3, 2, 8)
    assert alone.keys() == shared.keys() and len(alone) == 48
    assert all(torch.equal(alone[place], shared[place]) for place in alone)
    # 48 positions are two epochs: each sample comes twice, never as the same crop.
    ids = Order(NUM, 3).at(np.arange(48))
    for index in range(NUM):
        one, other = np.flatnonzero(ids == index).tolist()
        assert not torch.equal(alone[one], alone[other])
    again = Images(data.data, "train", SIZE, seed=1)
    assert not torch.equal(again.at(0, 0)["pixels"], data.at(0, 0)["pixels"])


def test_an_epoch_that_ends_inside_a_microbatch(tmp_path: Path) -> None:
    data = open_images(tmp_path, make_folder(tmp_path / "source"), "train")
    data.ids = data.ids[:3]
    whole = batches(data, 5, 1, 1)
    assert len({tuple(pixels.flatten().tolist()) for pixels in whole.values()}) == 5


def test_crops_lie_inside_and_have_the_share_that_was_asked() -> None:
    draws = np.random.default_rng(0)
    shares, ratios = [], []
    for _ in range(300):
        left, upper, right, lower = random_box((50, 40), (0.2, 0.9), draws)
        assert 0 <= left < right <= 50 and 0 <= upper < lower <= 40
        shares.append((right - left) * (lower - upper) / 2000)
        ratios.append((right - left) / (lower - upper))
    assert 0.2 <= min(shares) < 0.25 and 0.8 < max(shares) <= 0.9
    assert 0.74 < min(ratios) < 0.78 and 1.28 < max(ratios) < 1.34
    # No crop of nearly all of a long strip has such a ratio: the square in its middle.
    assert random_box((100, 10), (0.9, 1.0), draws) == (45, 0, 55, 10)
    # 0.875 of the shorter side, 32: 28 pixels in the middle.
    assert centre_box((40, 32)) == (6, 2, 34, 30)


def test_pixels_are_normalised_and_grey_is_grey(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    PIL.new("RGB", (20, 20), (255, 0, 51)).save(folder / "a.png")
    deep = np.full((20, 20), 200 << 8, dtype=np.uint16)  # pillow's own conversion clips at 255
    PIL.fromarray(deep).save(folder / "b.png")
    data = keys(tmp_path, folder, path_eval=str(folder), mean=[0.5, 0.25, 0.2], std=[0.5, 1, 2])
    pixels = Images(data, "val", 8)[0]["pixels"]
    assert pixels.shape == (3, 8, 8) and pixels.dtype == torch.float32
    assert pixels[:, 3, 3].tolist() == pytest.approx([1.0, -0.25, 0.0], abs=1e-6)
    grey = Images(keys(tmp_path, folder, path_eval=str(folder)), "val", 8, channels=1)[1]["pixels"]
    usual = (200 / 255 - (0.485 + 0.456 + 0.406) / 3) / ((0.229 + 0.224 + 0.225) / 3)
    assert grey.shape == (1, 8, 8) and grey[0, 0, 0].item() == pytest.approx(usual, rel=1e-5)
    with pytest.raises(ConfigError, match="data.mean has 3 numbers for 1 channels"):
        Images(data, "val", 8, channels=1)
    with pytest.raises(ConfigError, match="1 or 3 channels here, and 2"):
        Images(data, "val", 8, channels=2)


def test_half_of_the_training_images_are_mirrored(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    half = np.zeros((20, 20), dtype=np.uint8)
    half[:, 10:] = 255
    PIL.fromarray(half).save(folder / "a.png")
    data = keys(tmp_path, folder, path_eval=str(folder), crop_scale=[1, 1])
    found = [Images(data, "train", 8).at(0, place)["pixels"] for place in range(60)]
    mirrored = sum(bool(pixels[0, 4, 0] > pixels[0, 4, 7]) for pixels in found)
    assert 15 < mirrored < 45
    off = Images(data.model_copy(update={"flip": False}), "train", 8)
    assert all(off.at(0, n)["pixels"][0, 4, 0] < 0 for n in range(20))


def damage(source: Path) -> tuple[int, str]:
    """Make one image of a source unreadable; return its number and how a person would call it."""
    if source.suffix == ".csv":
        source = source.parent / "images"
    if any(source.glob("cat")):
        (source / NAMES[5]).write_bytes(CONTENT[NAMES[5]][:-30])
        return 2, NAMES[5]
    if any(source.glob("*.tar")):
        raw = (source / "0.tar").read_bytes()
        (source / "0.tar").write_bytes(raw.replace(CONTENT[NAMES[5]][:40], b"x" * 40))
        return 5, "0.tar, member a/05.png"
    import pyarrow.parquet as parquet

    rows = parquet.read_table(source / "0.parquet").to_pylist()
    rows[5]["image"]["bytes"] = b"not an image"
    import pyarrow as arrow

    parquet.write_table(arrow.Table.from_pylist(rows), source / "0.parquet", row_group_size=5)
    return 5, "0.parquet, row 5"


def test_a_corrupt_image_is_named(source: Path, tmp_path: Path) -> None:
    number, name = damage(source)
    if source.suffix == ".csv":
        number = 5
    data = open_images(tmp_path, source)
    with pytest.raises(DataError, match="cannot be decoded") as caught:
        data[number]
    assert name in str(caught.value) and "data.max_bad" in str(caught.value)
    assert data[number + 1]["pixels"].shape == (3, SIZE, SIZE)


def test_corrupt_images_are_left_out_up_to_a_limit(source: Path, tmp_path: Path) -> None:
    _, name = damage(source)
    said: list[str] = []
    found = prepare_images(keys(tmp_path, source, max_bad=1), said.append)
    assert found["num_images"] == NUM - 1 and any(name in text for text in said)
    assert ImageIndex(Path(found["images_train"])).manifest.num_bad == 1
    with pytest.raises(DataError, match="1 images cannot be decoded, and data.max_bad allows 0"):
        prepare_images(keys(tmp_path, source, max_bad=0), said.append)


def test_a_loader_process_says_it_in_our_words(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "source")
    damage(folder)
    data = open_images(tmp_path, folder, "train")
    batches = Microbatches(loaded(data, StepSlice(NUM, 1, 1, 0)), 1, LoaderPlan(1, 1, 60.0, False))
    with pytest.raises(DataError) as caught:
        next(batches)
    batches.close()
    assert f"{folder / NAMES[5]} cannot be decoded" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def tar_of(path: Path, *members: tarfile.TarInfo, raw: bytes = b"") -> Path:
    with tarfile.open(path, "w") as tar:
        add(tar, "00.png", CONTENT[NAMES[0]])
        for member in members:
            tar.addfile(member, io.BytesIO(raw))
    return path


def member_of(kind: bytes, name: str = "01.png", size: int = 0) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, size, "/etc/passwd"
    return member


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_tar_with_links_is_refused(kind: bytes, tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar", member_of(kind))
    with pytest.raises(DataError, match="member 01.png is a link, a device or sparse"):
        open_images(tmp_path, path)


def test_a_tar_with_a_huge_member_is_refused(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar")
    header = member_of(tarfile.REGTYPE, size=300 << 20).tobuf()
    with path.open("r+b") as file:  # sparse: nothing of it is on the disk
        file.seek(512 + -(-len(CONTENT[NAMES[0]]) // 512) * 512)
        file.write(header)
        file.truncate(400 << 20)
    with pytest.raises(DataError, match="member 01.png has 314572800 bytes"):
        open_images(tmp_path, path)


def test_a_tar_that_is_cut_off_or_damaged_is_refused(tmp_path: Path) -> None:
    whole = (make_tars(tmp_path / "tars") / "0.tar").read_bytes()
    path = tmp_path / "a.tar"
    path.write_bytes(whole[:5000])
    with pytest.raises(DataError, match="a.tar"):
        open_images(tmp_path, path)
    place = whole.index(b"a/03.png")
    path.write_bytes(whole[:place] + b"garbage!" + whole[place + 8 :])
    with pytest.raises(DataError, match=f"there is no header at byte {place}"):
        open_images(tmp_path, path)


def test_sources_that_are_none(tmp_path: Path) -> None:
    mixed = make_tars(tmp_path / "mixed")
    (mixed / "a.png").write_bytes(CONTENT[NAMES[0]])
    (tmp_path / "empty").mkdir()
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "a.tar.gz").write_bytes(b"")
    (tmp_path / "list.csv").write_text("where\nx.png\n")
    (tmp_path / "torn.csv").write_bytes(b"path\na.png\rb\n")
    (tmp_path / "odd.parquet").write_bytes(b"PAR1 and no more")
    cases = {
        "torn.csv": "torn.csv:1 is not CSV",
        "odd.parquet": "cannot be read as parquet",
        "mixed": "more than one kind of source",
        "empty": "holds no images",
        "packed": "a.tar.gz is compressed",
        "packed/a.tar.gz": "is compressed",
        "list.csv": "no column of paths",
        "gone": "does not exist",
    }
    for name, told in cases.items():
        with pytest.raises(DataError, match=told):
            open_images(tmp_path, tmp_path / name)


def test_links_are_followed_and_never_in_a_circle(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "source")
    (folder / "again").symlink_to(folder, target_is_directory=True)
    (folder / "bird").symlink_to(make_folder(tmp_path / "other") / "cat", target_is_directory=True)
    found = open_images(tmp_path, folder)
    assert len(found) == NUM + NUM // 2 and found.classes == ["bird", "cat", "dog"]


def test_a_parquet_file_without_images_is_refused(tmp_path: Path) -> None:
    folder = make_parquet(tmp_path / "source")
    with pytest.raises(DataError, match="has no column 'picture'; it has image, label"):
        open_images(tmp_path, folder, image_column="picture")
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    parquet.write_table(
        arrow.table({"image": [{"bytes": None, "path": "a.png"}]}), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match="a.parquet, row 0 holds no bytes: only the path 'a.png'"):
        open_images(tmp_path, tmp_path / "a.parquet")[0]


def test_a_fifo_in_place_of_an_image_is_named_at_once(tmp_path: Path) -> None:
    import os

    folder = make_folder(tmp_path / "source")
    data = open_images(tmp_path, folder)
    (folder / NAMES[5]).unlink()
    os.mkfifo(folder / NAMES[5])
    with pytest.raises(DataError, match="is not a plain file"):
        data[2]


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_images(tmp_path, make_folder(tmp_path / "source"))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[images\]'"):
        data[0]


def test_a_damaged_list_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "source")
    home = Path(prepare_images(keys(tmp_path, folder), lambda text: None)["images_train"])
    (home / "samples.npy").write_bytes((home / "samples.npy").read_bytes()[:-90])
    with pytest.raises(DataError, match="damaged"):
        ImageIndex(home)


def test_images_of_masked_autoencoders(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = make_folder(tmp_path / "source")
    job = load_job(
        "mae_tiny",
        [f"data.path_train={folder}", "data.val_fraction=0.3", f"data.cache_dir={tmp_path}"],
    )
    job.workload.prepared = job.workload.prepare(job.config, lambda text: None)
    train, val = (job.workload.build_data(job.config, split) for split in ("train", "val"))
    assert train is not None and val is not None and len(train) + len(val) == NUM
    batch = default_collate([val[n] for n in range(len(val))])
    assert batch["pixels"].shape[1:] == (1, 32, 32) and batch["order"].shape[1] == 16
    again = default_collate([val[n] for n in range(len(val))])
    assert all(torch.equal(batch[key], again[key]) for key in batch)
    at: Any = train
    assert not torch.equal(at.at(0, 1)["order"], at.at(0, 2)["order"])
    none = job.config.data.model_copy(update={"val_fraction": 0.0})
    assert job.workload.build_data(job.config.model_copy(update={"data": none}), "val") is None


def test_image_keys_of_masked_autoencoders_are_checked_while_planning(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    wrong = plan(
        f"data.path_train={tmp_path}", "model.hf_config.num_channels=2", "data.mean=[0.5]",
        source="mae_tiny",
    )  # fmt: skip
    found = {problem.where for problem in wrong.problems()}
    assert found == {"model.hf_config.num_channels", "data.mean"}
    idle = plan("data.flip=false", source="mae_tiny").findings
    assert any(f.where == "data.flip" and "no effect" in f.what for f in idle)
