"""What ranks tell each other through the rendezvous store: it works where a fabric does not.

So a wrong all_gather can still be reported, and a rank that never came can be named.
"""

import json
import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

# How much longer the others wait for rank 0's list than rank 0 waits for them.
GRACE_S = 5.0


def default_store() -> Store:
    """The store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()


def turn_key(store: Store, what: str, rank: int) -> str:
    """A key of this call's own. Each rank counts its calls: all make them in the same order."""
    return f"paceline/{what}/{store.add(f'paceline/{what}/turns/{rank}', 1)}"


def gather_texts(text: str) -> list[str]:
    """Every rank's text in rank order, on rank 0; an empty list elsewhere."""
    store, rank = default_store(), dist.get_rank()
    key = turn_key(store, "gather", rank)
    store.set(f"{key}/{rank}", text)
    if rank != 0:
        return []
    return [store.get(f"{key}/{peer}").decode() for peer in range(dist.get_world_size())]


def find_missing_ranks(store: Store, rank: int, world_size: int, timeout_s: float) -> list[int]:
    """Ranks that did not call this within `timeout_s`, the same list on all that did.

    Needs no process group: call it before `init_process_group`, which waits without naming anyone.
    """
    key = turn_key(store, "roll", rank)
    store.set(f"{key}/{rank}", "here")
    if rank != 0:
        if not _appears(store, f"{key}/missing", timeout_s + GRACE_S):
            return [0]
        return [int(missing) for missing in json.loads(store.get(f"{key}/missing"))]
    deadline = time.monotonic() + timeout_s
    missing = [
        peer
        for peer in range(world_size)
        if not _appears(store, f"{key}/{peer}", deadline - time.monotonic())
    ]
    store.set(f"{key}/missing", json.dumps(missing))
    return missing


def _appears(store: Store, key: str, timeout_s: float) -> bool:
    try:
        # Past the deadline a key that is there still counts; zero means "no limit" to some stores.
        store.wait([key], timedelta(seconds=max(timeout_s, 0.01)))
    except RuntimeError:  # stores differ in which subclass they raise
        return False
    return True
