"""Data sets and tokenizers of the Hugging Face hub, by name: files of one pinned revision.

ORG/NAME    ORG/NAME@REVISION    hf://datasets/ORG/NAME@REVISION/FOLDER
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.data.extras import require_extra
from paceline.errors import DataError

WORD = r"[\w.-]+"
SHORT = re.compile(rf"({WORD}/{WORD})(?:@([^/]+))?")
LONG = re.compile(rf"hf://datasets/({WORD}/{WORD})(?:@([^/]+))?(?:/(.+))?")
PINNED = re.compile(r"[0-9a-f]{40}")
MAX_SAID = 300


@dataclass(frozen=True)
class HubSet:
    """A data set's name, a revision (a commit once it is pinned), and a folder in it."""

    name: str
    revision: str
    folder: str

    def __str__(self) -> str:
        return f"hf://datasets/{self.name}@{self.revision}/{self.folder}".rstrip("/")

    def pin(self) -> "HubSet":
        """Return the same set at the commit that its revision names now."""
        if PINNED.fullmatch(self.revision):
            return self
        at = {"revision": self.revision}
        info = _ask(str(self), lambda hub: hub.HfApi().dataset_info(self.name, **at))
        return replace(self, revision=str(info.sha))

    def list_files(self) -> list[str]:
        """Return the names of the files in the folder, from the top of the data set."""
        listed = _ask(
            str(self),
            lambda hub: hub.HfApi().list_repo_files(
                self.name, revision=self.revision, repo_type="dataset"
            ),
        )
        prefix = f"{self.folder}/" if self.folder else ""
        return sorted(name for name in listed if name.startswith(prefix))

    def download(self, name: str) -> Path:
        """Return the local path of a file, from the cache if it is there."""
        fetch = {"revision": self.revision, "repo_type": "dataset"}
        return Path(_ask(str(self), lambda hub: hub.hf_hub_download(self.name, name, **fetch)))


def parse_hub(source: str) -> HubSet | None:
    """Return the data set on the hub that a source names; None if it is something else, or if a
    local folder has that name."""
    found = LONG.fullmatch(source)
    if found is None and not Path(source).expanduser().exists():
        found = SHORT.fullmatch(source)
    if found is None or source.startswith("."):
        return None
    name, revision, *folder = found.groups()
    return HubSet(name, revision or "main", (folder[0] or "").strip("/") if folder else "")


def download_model_files(name: str, patterns: Sequence[str]) -> Path:
    """Return a folder with these files of a model of the hub."""
    return Path(_ask(name, lambda hub: hub.snapshot_download(name, allow_patterns=list(patterns))))


def _ask(what: str, call: Callable[[Any], Any]) -> Any:
    hub = require_extra("huggingface_hub", "text")
    try:
        return call(hub)
    except Exception as error:  # of the network, the hub, or the rights to a set: many classes
        why = " ".join(str(error).split())[:MAX_SAID]
        raise DataError(
            f"{what} is not a file or folder here and cannot be had from the hub: {why}\n"
            "hint: check the name and the network, or copy it and give its folder"
        ) from error
