"""Secrets shared only by the processes of one user, by which ranks recognise each other.

They never travel over the network: through the launcher's environment (PACELINE_SECRET), in a file
of the run directory (launch/command.py), or as a key in the user's state folder, which nodes share.
Both files are readable for this user alone.
"""

import hashlib
import hmac
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from paceline.errors import ClusterError, ConfigError, DataError
from paceline.records.files import read_regular, write_atomic
from paceline.trust import open_state, state_folder

SECRET = "PACELINE_SECRET"
MIN_LETTERS = 16
KEY = "key"
NUM_BYTES = 32
MAX_BYTES = 1024
HINT = (
    f"hint: give every rank the same long random text in {SECRET}, or let XDG_STATE_HOME name a"
    " folder that all nodes share"
)


def shared_secret() -> bytes:
    """Return what all ranks of this user know: PACELINE_SECRET, else the key in the state folder,
    made where there is none yet."""
    given = os.environ.get(SECRET, "")
    if given and len(given) < MIN_LETTERS:
        raise ConfigError(f"{SECRET} has {len(given)} letters, and anybody could guess it\n{HINT}")
    return given.encode() or _user_key()


def make_secret(path: Path) -> str:
    """Write a new secret, for this user's eyes, and return it."""
    secret = secrets.token_hex(NUM_BYTES)
    write_atomic(path, secret, mode=0o600)
    return secret


def read_secret(path: Path) -> bytes:
    """Return a secret that a process of this user has written; nobody else may have read it."""
    try:
        facts = path.lstat()
        secret = read_regular(path, MAX_BYTES)
    except (OSError, DataError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ClusterError(f"the secret of this run cannot be read: {path}: {why}") from error
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o077 or len(secret) < MIN_LETTERS:
        raise ClusterError(
            f"{path} is not a secret: others could have read or written it\n"
            "hint: remove it; a new one is made"
        )
    return secret


def derive(secret: bytes, *purpose: str) -> bytes:
    """Return a key for one purpose: none of them tells anything of the others, or of the secret."""
    return hmac.digest(secret, "\0".join(purpose).encode(), hashlib.sha256)


def _user_key() -> bytes:
    path = state_folder() / KEY
    if not path.exists():
        try:
            _make_key(open_state())
        except OSError as error:
            raise ClusterError(
                f"ranks need a secret, and none can be kept in {path.parent}: {error.strerror}\n"
                f"{HINT}"
            ) from error
    return read_secret(path)


def _make_key(folder: Path) -> None:
    """Make the key whole or not at all: of many ranks that start at once one makes it for all."""
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{KEY}.")  # 0600 from the beginning
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(NUM_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, folder / KEY)
    finally:
        Path(temporary).unlink()
