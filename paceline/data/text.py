"""Turns text into token shards, which are kept between runs, and these into samples.

    prepare_tokens(config.data, say, tokenizer)    once, before ranks start: shards, manifest.json
    open_tokens(folder, config.data, "train")      on every rank: memory-mapped, by index

By default a token is a byte, and 256 stands behind each document. A document belongs to train or to
validation by the hash of its content, so neither changes when files are added or the order differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.data.base import TextData
from paceline.data.documents import Source, find_source, iter_documents
from paceline.data.hub import parse_hub
from paceline.data.shards import (
    MANIFEST,
    Manifest,
    Origin,
    map_shard,
    verify_shards,
    write_shards,
)
from paceline.data.tokenizer import BYTES, Tokenizer
from paceline.errors import ConfigError, DataError, DiskError
from paceline.records.files import FileLock, fingerprint
from paceline.records.words import count, size

if TYPE_CHECKING:
    from paceline.data.packing import PackedTokens, PaddedDocuments


def find_prepared(data: TextData) -> Path | None:
    """Return the folder of `paceline prepare text` that a source is; None where it is none."""
    folder = Path(data.source).expanduser()
    is_ours = (folder / MANIFEST).is_file() and any(folder.glob("*_?????.bin"))
    return folder.resolve() if is_ours else None


def prepare_tokens(
    data: TextData, say: Callable[[str], None], tokenizer: Tokenizer = BYTES
) -> tuple[Path, Manifest]:
    """Tokenise the source unless its shards are there already; safe to call from any process. Of a
    folder that is prepared already the shards are checked, and `tokenizer` is not asked."""
    prepared = find_prepared(data)
    if prepared is None:
        source = find_source(data)
        home = _home(data, source, tokenizer)
        if not (home / MANIFEST).is_file():  # else they are there whole, perhaps read-only
            source.require_text()
            build_tokens(home, data, source, tokenizer, say)
    else:
        home = prepared
    manifest = Manifest.load(home / MANIFEST)
    verify_shards(home, manifest, say)
    return home, manifest


def build_tokens(
    home: Path,
    data: TextData,
    source: Source,
    tokenizer: Tokenizer,
    say: Callable[[str], None],
    workers: int | None = None,
) -> None:
    """Write the shards of a source into `home`, unless another process has done so meanwhile."""
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        # Two processes never build the same shards.
        with FileLock(home.with_name(f"{home.name}.lock")) as lock:
            if not (home / MANIFEST).is_file():
                _announce(source, tokenizer, say)
                manifest = write_shards(
                    home,
                    Origin(
                        source=data.source,
                        revision=source.revision,
                        made_from=made_from(data, source, tokenizer),
                        val_fraction=data.val_fraction,
                    ),
                    iter_documents(source.files, data.text_field, not tokenizer.is_bytes),
                    tokenizer,
                    workers or len(os.sched_getaffinity(0)),
                )
                _tell(manifest, say)
            lock.path.unlink(missing_ok=True)  # whoever waits for it finds the manifest
    except OSError as error:
        told = f"cannot keep token shards in {home.parent}: {error}"
        if DiskError.is_meant(error):
            hint = "free space there, or choose another folder: data.cache_dir, or --out"
            raise DiskError(f"{told}\nhint: {hint}") from error
        hint = f"data.cache_dir={data.cache_dir} chooses another, or --out"
        raise DataError(f"{told}\nhint: {hint}") from error


def _announce(source: Source, tokenizer: Tokenizer, say: Callable[[str], None]) -> None:
    how = "as bytes" if tokenizer.is_bytes else f"with the tokenizer {tokenizer.name}"
    num_files = count(len(source.files), "file")
    say(f"reading {num_files} ({size(source.num_bytes)}) of {source.name} {how}")
    if not tokenizer.names_end:
        say(f"it names no token that ends a text: {tokenizer.end_id} stands behind each document")
    num_val = sum(file.split == "val" for file in source.files)
    if num_val:
        say(f"validation is the source's own: {num_val} of the files")


def _tell(manifest: Manifest, say: Callable[[str], None]) -> None:
    say(f"{manifest.num_tokens:,} tokens in {count(len(manifest.shards), 'shard')}")
    if manifest.num_repeated:
        say(f"{manifest.num_repeated} documents are left out: they stand in validation too")


def open_tokens(home: Path, data: TextData, split: str) -> PackedTokens | PaddedDocuments | None:
    """Return the prepared samples of a split; None when it holds less than one."""
    from paceline.data.packing import PackedTokens, PaddedDocuments  # and with it torch

    manifest = Manifest.load(home / MANIFEST)
    parts = [map_shard(home, manifest, s) for s in manifest.shards if s.split == split]
    name, end_id = manifest.fingerprint, manifest.end_id
    tokens: PackedTokens | PaddedDocuments
    if data.pack == "padded":
        tokens = PaddedDocuments(parts, data.seq_len, name, end_id)
    else:
        tokens = PackedTokens(parts, data.seq_len, name, end_id if data.keeps_apart else None)
    return tokens if len(tokens) else None


def require_same_tokenizer(manifest: Manifest, home: Path, asked: Tokenizer) -> None:
    """Refuse shards of another tokenizer than the one that was asked for, or that the model's
    weights were trained with: every id would mean something else."""
    if manifest.tokenizer_sha256 != asked.sha256:
        raise ConfigError(
            f"data.source={home} was made with the tokenizer {manifest.tokenizer}"
            f" ({manifest.tokenizer_sha256[:12]}), and {asked.name} ({asked.sha256[:12]}) is asked"
            " for: the same numbers stand for other tokens\n"
            f"hint: paceline prepare text SOURCE --out DIR --tokenizer {asked.name}; or set"
            f" data.tokenizer={home / 'tokenizer.json'} to mean it"
        )


def made_from(data: TextData, source: Source, tokenizer: Tokenizer) -> str:
    """Return a name that changes when a file, or how it is read, changes."""
    how = f"{Manifest.SCHEMA}:{data.text_field}:{data.val_fraction!r}"
    tokens = () if tokenizer.is_bytes else (tokenizer.sha256, str(tokenizer.end_id))
    return fingerprint(how, *tokens, *source.state)


def _home(data: TextData, source: Source, tokenizer: Tokenizer) -> Path:
    """Return where this source's shards lie between runs."""
    hub = parse_hub(data.source)
    stem = hub.name.replace("/", "--") if hub else Path(data.source).stem
    name = f"{stem}-{made_from(data, source, tokenizer)}"
    return Path(data.cache_dir).expanduser() / "tokens" / name
