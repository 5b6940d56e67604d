"""`paceline data smoke`: the layouts of real data sets are read, and what hangs is named."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.errors import ConfigError, DataError
from paceline.job import load_job
from paceline.prepare.text import TextRequest, prepare_text
from paceline.train.smoke import smoke_data
from tests.unit.test_sources import settings, stories, tiny_stories, write_table
from tests.unit.test_tokenizers import save, train_bpe

SMALL = ["data.seq_len=16", "train.micro_batch_size=2"]


@pytest.fixture
def gpt2(tmp_path: Path) -> str:
    """A tokenizer on disk in place of the one that the recipes name."""
    folder = save(tmp_path / "tokenizer", train_bpe(iter(stories(0, 50)), 280))
    return f"data.tokenizer={folder}"


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """While inside, the kernel lets nobody open the file: another process has a lease on it, as a
    file server does that does not answer."""
    handled = signal.signal(signal.SIGIO, signal.SIG_IGN)
    handle = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(handle)
        signal.signal(signal.SIGIO, handled)


def test_tiny_stories_are_read_where_they_lie(tmp_path: Path, gpt2: str) -> None:
    source = tiny_stories(tmp_path / "set")
    found = smoke_data(load_job("tinystories", [*SMALL, gpt2, f"data.source={source}"]), 20)
    assert found.num_batches >= 2 and found.units_per_s > 0 and found.unit == "tokens"
    assert found.num_files == 3


def test_fineweb_is_read_where_it_lies(tmp_path: Path, gpt2: str) -> None:
    for number in range(2):
        write_table(tmp_path / f"set/sample/10BT/{number:03d}_00000.parquet", stories(0, 20))
    words = [*SMALL, gpt2, f"data.source={tmp_path / 'set'}"]
    found = smoke_data(load_job("fineweb_edu", words), 20)
    assert found.num_batches >= 2 and found.first_s <= found.elapsed_s


def test_a_file_that_hangs_is_named(tmp_path: Path, gpt2: str) -> None:
    source = tiny_stories(tmp_path / "set")
    job = load_job("tinystories", [*SMALL, gpt2, f"data.source={source}"])
    stuck = source / "data/train-00001-of-00002-5f1f.parquet"
    with hanging(stuck), pytest.raises(DataError, match=f"(?s){stuck} gave nothing for 1"):
        smoke_data(job, 1.0)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, gpt2: str) -> None:
    source = tiny_stories(tmp_path / "set")
    (source / "data/train-00001-of-00002-5f1f.parquet").write_bytes(b"PAR1 and no more")
    job = load_job("tinystories", [*SMALL, gpt2, f"data.source={source}"])
    with pytest.raises(DataError, match="train-00001-of-00002-5f1f.parquet cannot be read"):
        smoke_data(job, 20)


def test_prepared_shards_are_read_as_in_a_run(tmp_path: Path) -> None:
    asked = TextRequest(settings(tiny_stories(tmp_path / "set"), tmp_path), 280, 1)
    prepare_text(asked, tmp_path / "shards", lambda text: None)
    words = [*SMALL, f"data.source={tmp_path / 'shards'}", "data.document_mask=true"]
    found = smoke_data(load_job("lm_tiny", words), 20)
    assert found.num_batches == 2048 and found.longest_at.startswith(str(tmp_path / "shards"))


def test_a_job_that_cannot_run_is_refused(tmp_path: Path, gpt2: str) -> None:
    source = tiny_stories(tmp_path / "set")
    words = [*SMALL, gpt2, f"data.source={source}", "model.vocab_size=200"]
    with pytest.raises(ConfigError, match="200 rows cannot hold"):
        smoke_data(load_job("tinystories", words), 20)
    words = [*SMALL, gpt2, f"data.source={source}", "train.micro_batch_size=100000"]
    with pytest.raises(DataError, match="ended before its first batch"):
        smoke_data(load_job("tinystories", words), 20)


def test_other_workloads_have_data_too() -> None:
    assert smoke_data(load_job("mae_tiny", ["train.micro_batch_size=2"]), 20).unit == "samples"
