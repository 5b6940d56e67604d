"""Messages between ranks at a store that anybody may write to: signed, or ignored.

A store has no passwords. So every word is signed (HMAC-SHA256) with a key that never touches the
store, over its name, the session that it belongs to, whom it is for, and what it says: a word that
was changed, made up, or said in an earlier run or to another rank is refused, and reported.
"""

import hashlib
import hmac
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

LOG = logging.getLogger("paceline")
GET_S = 5.0  # a key that is there is read at once, unless somebody takes it away
MAX_REPORTS = 8  # a flood of words is not answered by one of reports
Body = dict[str, Any]


@dataclass
class SignedStore:
    """Signed messages of one rank's process. `session` is rank 0's, new for each process."""

    store: Store
    key: bytes
    where: Callable[[], str]  # the store's address, and its peers where they can be known
    session: str = ""
    _refused: set[tuple[str, bytes]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.store.set_timeout(timedelta(seconds=GET_S))

    def say(self, name: str, body: Body, to: str = "") -> None:
        """Publish a message. `to` is a value that only its reader has chosen, if it is for a single
        reader."""
        text = json.dumps(body, sort_keys=True)
        self.store.set(name, json.dumps({"says": text, "mac": self._sign(name, text, to)}))

    def hear(self, name: str, to: str = "") -> Body | None:
        """Return a message; None if there is none, or none that is validly signed."""
        if not self.store.check([name]):
            return None
        try:
            raw = self.store.get(name)
        except dist.DistStoreError:  # somebody has taken it away
            return None
        try:
            word = json.loads(raw)
            says, mac = str(word["says"]), str(word["mac"])
            if hmac.compare_digest(mac.encode(), self._sign(name, says, to).encode()):
                body = json.loads(says)
                return body if isinstance(body, dict) else None
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # no word of ours
        self._report(name, raw)
        return None

    def has_all(self, names: Sequence[str]) -> bool:
        """True when each of these was said, by one of us. One question to the store, mostly."""
        is_there = not names or self.store.check(list(names))
        return is_there and all(self.hear(name) is not None for name in names)

    def _sign(self, name: str, text: str, to: str) -> str:
        signed = json.dumps([name, self.session, to, text]).encode()
        return hmac.digest(self.key, signed, hashlib.sha256).hex()

    def _report(self, name: str, raw: bytes) -> None:
        seen = name, hashlib.sha256(raw).digest()
        if seen in self._refused or len(self._refused) >= MAX_REPORTS:
            return
        self._refused.add(seen)
        LOG.warning(
            "refused: %r at the ranks' store is not signed by this run: somebody else writes"
            " there (%s)",
            name,
            self.where(),
        )
