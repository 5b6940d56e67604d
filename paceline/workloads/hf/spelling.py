"""The tokenizer that goes with an exported model, in the files that transformers reads.

    write_tokenizer(folder, prepared)        that of the run's data, whose path data.json has
    byte_tokenizer()                         ours of bytes: ids 0 to 255, and the end of a document

Where the model came with a tokenizer of its own, and was trained with it, its files are copied:
they have more in them than ids, such as a template for chats.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.data.shards import MANIFEST, Manifest
from paceline.data.tokenizer import (
    BYTE_END,
    BYTES,
    FILE,
    FILES,
    MAX_FILE_BYTES,
    find_tokenizer,
    holds_tokenizer,
    parse_definition,
)
from paceline.records.files import read_text
from paceline.workloads.hf.model import require_extra

END, BEGIN = "<|endoftext|>", "<|startoftext|>"
MORE_FILES = (*FILES, "added_tokens.json", "chat_template.jinja", "normalizer.json")


def end_of_text(prepared: Mapping[str, Any]) -> int | None:
    """Return the id that stands behind every document; None where the run read no text."""
    shards = _shards(prepared)
    return None if shards is None else Manifest.load(shards / MANIFEST).end_id


def write_tokenizer(folder: Path, prepared: Mapping[str, Any]) -> bool:
    """Write the tokenizer of a run into a folder; False where the run has none: its tokens were
    random numbers."""
    own = prepared.get("hf_folder")
    beside = Path(own) if isinstance(own, str) and holds_tokenizer(Path(own)) else None
    shards = _shards(prepared)
    if shards is None:
        return beside is not None and copy_tokenizer(beside, folder)
    manifest = Manifest.load(shards / MANIFEST)
    if beside is not None and find_tokenizer("auto", beside).sha256 == manifest.tokenizer_sha256:
        return copy_tokenizer(beside, folder)
    if manifest.is_bytes:
        byte_tokenizer().save_pretrained(folder)
    else:
        text = read_text(shards / FILE, MAX_FILE_BYTES, follow=True)
        save_definition(text, manifest.end_id, folder)
    return True


def copy_tokenizer(source: Path, folder: Path) -> bool:
    """Copy a tokenizer's files as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MORE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return True


def save_definition(definition: str, end_id: int, folder: Path) -> None:
    """Write a tokenizer.json with the files that transformers wants beside it."""
    library = parse_definition(definition, FILE)
    end = library.id_to_token(end_id)
    named = {} if end is None else {"eos_token": end}
    kind = require_extra().PreTrainedTokenizerFast
    kind(tokenizer_object=library, **named).save_pretrained(folder)


def byte_tokenizer(has_begin: bool = False) -> Any:
    """Return our tokenizer of bytes as one of transformers. `has_begin`: every text begins with a
    token of its own (257) and ends with the end's, as `data/spelling.py` has it."""
    library = require_extra("tokenizers")
    letters = _byte_letters()
    model = library.models.BPE(vocab={letters[b]: b for b in range(256)}, merges=[])
    made = library.Tokenizer(model)
    # Bytes are written as printable letters; no rule cuts a text into words.
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = library.decoders.ByteLevel()
    special = [END, BEGIN] if has_begin else [END]
    made.add_special_tokens(special)
    assert made.token_to_id(END) == BYTES.end_id == BYTE_END, "ids are those of training"
    if has_begin:
        made.post_processor = library.processors.TemplateProcessing(
            single=f"{BEGIN} $A {END}",
            special_tokens=[(word, made.token_to_id(word)) for word in special],
        )
    return require_extra().PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def _byte_letters() -> list[str]:
    """Return a printable letter for each byte, as byte-level tokenizers have them: visible Latin-1
    stands for itself, the others are counted from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(b) if b in visible else chr(256 + hidden.index(b)) for b in range(256)]


def _shards(prepared: Mapping[str, Any]) -> Path | None:
    place = prepared.get("shards")
    return Path(place) if isinstance(place, str) else None
