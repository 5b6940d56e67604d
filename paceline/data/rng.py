"""Random generators of a rank as tensors, so that dropout continues where it stopped."""

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture_rng(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators on CPU and on this device, numpy's and Python's
    own."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    states = {
        "torch_cpu": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(numpy_state[1].astype(np.int64)),
        "numpy_place": torch.tensor(numpy_state[2:4], dtype=torch.int64),
        "numpy_gauss": torch.tensor([numpy_state[4]], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["torch_device"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: dict[str, Tensor], device: torch.device) -> None:
    """Set the generators to what `capture_rng` returned."""
    torch.set_rng_state(states["torch_cpu"])
    version, *words = states["python"].tolist()
    gauss = states["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    place, has_gauss = states["numpy_place"].tolist()
    keys = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, place, has_gauss, states["numpy_gauss"].item()))
    if device.type == "cuda" and "torch_device" in states:
        torch.cuda.set_rng_state(states["torch_device"], device)


def seed_rng(*parts: int) -> None:
    """Seed all generators, where there is no state to resume from. Every bit of every part counts:
    torch on a CPU and numpy take 32 bits only, so the parts are hashed."""
    text = ",".join(map(str, parts)).encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest())
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
