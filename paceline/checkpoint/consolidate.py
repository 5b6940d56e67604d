"""From the files of many ranks to one of each kind: `checkpoint.state=full`, and `convert`."""

from pathlib import Path

from paceline.checkpoint.pieces import SECTIONS, Piece, Section
from paceline.checkpoint.tensors import SUFFIX, TensorFiles, Written, write_pieces
from paceline.errors import RestoreError
from paceline.records import Manifest, TensorEntry
from paceline.records.files import sync_directory


def consolidate(folder: Path, manifest: Manifest) -> Manifest:
    """Whole tensors in `model.safetensors` and `optimizer.safetensors`, in place of all parts."""
    source, files = TensorFiles(folder, manifest), dict(manifest.files)
    tensors: dict[Section, dict[str, TensorEntry]] = {}
    for section in SECTIONS:
        path = folder / f"{section}{SUFFIX}"
        parts = [file for file in files if file.startswith(f"{section}-rank")]
        if len(parts) == 1:
            (folder / parts[0]).rename(path)
            files[path.name] = files.pop(parts[0])
            tensors[section] = _renamed(getattr(manifest, section), path.name)
        else:
            files[path.name], tensors[section] = write_whole(source, section, path)
            for part in parts:
                del files[part]
                (folder / part).unlink()
    sync_directory(folder)
    return Manifest(step=manifest.step, files=files, **tensors)


def _renamed(tensors: dict[str, TensorEntry], file: str) -> dict[str, TensorEntry]:
    return {
        name: entry.model_copy(
            update={"parts": [part.model_copy(update={"file": file}) for part in entry.parts]}
        )
        for name, entry in tensors.items()
    }


def write_whole(source: TensorFiles, section: Section, path: Path) -> Written:
    """Every tensor of a section, whole, in one file."""
    return write_pieces(path, whole_pieces(source, section))


def whole_pieces(source: TensorFiles, section: Section) -> list[Piece]:
    pieces = [
        Piece(section, name, shape, 0, source.rows(section, name, 0, (*shape, 1)[0]), ())
        for name, shape in source.shapes(section).items()
    ]
    if source.damages:
        raise RestoreError(source.damages)
    return pieces
