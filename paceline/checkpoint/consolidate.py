"""From the files of many ranks to one of each kind: `checkpoint.state=full`, and `convert`."""

from pathlib import Path

from paceline.checkpoint.pieces import SECTIONS, Piece, Section
from paceline.checkpoint.tensors import SUFFIX, TensorFiles, entries, write_pieces
from paceline.files import sync_directory
from paceline.records import FileSum, Manifest, TensorEntry


def consolidate(folder: Path, manifest: Manifest) -> Manifest:
    """Whole tensors in `model.safetensors` and `optimizer.safetensors`, in place of all parts."""
    source, files = TensorFiles(folder, manifest), dict(manifest.files)
    tensors: dict[Section, dict[str, TensorEntry]] = {}
    for section in SECTIONS:
        name = f"{section}{SUFFIX}"
        parts = [file for file in files if file.startswith(f"{section}-rank")]
        whole = whole_pieces(source, section)
        tensors[section] = entries(whole, name)
        if len(parts) == 1:
            (folder / parts[0]).rename(folder / name)
            files[name] = files.pop(parts[0])
        elif parts:
            files[name] = write_pieces(folder / name, whole)
            for part in parts:
                del files[part]
                (folder / part).unlink()
    sync_directory(folder)
    return Manifest(step=manifest.step, files=files, **tensors)


def whole_pieces(source: TensorFiles, section: Section) -> list[Piece]:
    """Every tensor of a section, whole. Memory-mapped where one file has all of it."""
    return [
        Piece(section, name, shape, 0, source.rows(section, name, 0, (*shape, 1)[0]), ())
        for name, shape in source.shapes(section).items()
    ]


def write_whole(source: TensorFiles, section: Section, path: Path) -> FileSum:
    return write_pieces(path, whole_pieces(source, section))
