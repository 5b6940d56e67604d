"""Signals whose ends are silent, and other odd ones, with what librosa makes of them.

    python -m tests.speech_signals > tests/data/librosa_trim.json      where librosa is installed

The signals are arithmetic, so they are the same on every machine; the files are the fixture's.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CORPUS = Path(__file__).parent / "data/speech"
TABLE = Path(__file__).parent / "data/librosa_trim.json"
RATE = 16000
NAMES = tuple(f"burst{number}" for number in range(24)) + (
    "tiny", "one_sample", "exact_hop", "all_loud", "ramp", "two_bursts", "faint",
)  # fmt: skip


def signal(name: str) -> NDArray[np.float32]:
    """Return the signal of a name."""
    t = np.arange(int(RATE * 1.5))
    tone = np.sin(t * 0.21) * np.cos(t * 0.013)
    if name.startswith("burst"):
        number = int(name.removeprefix("burst"))
        first, length = 311 * number + 97, 6000 + 613 * number
        around = 0.5 * 10.0 ** -(2 + number % 4)
        shape = np.where((t >= first) & (t < first + length), 0.5, around)
        return (shape * tone)[: 16000 + 41 * number].astype(np.float32)
    whole = {
        "tiny": tone[:100],
        "one_sample": tone[7:8],
        "exact_hop": np.where(t < 4096, 0, tone)[: 512 * 20],
        "all_loud": tone,
        "ramp": tone * (t / len(t)) ** 6,
        "two_bursts": tone * (((t > 3000) & (t < 5000)) | ((t > 15000) & (t < 16000))),
        "faint": tone * 2e-4 * (t > 9000),
    }
    return whole[name].astype(np.float32)


def table() -> dict[str, Any]:
    import librosa

    rows = []
    for name in NAMES:
        for top_db in (20.0, 40.0, 60.0):
            start, end = librosa.effects.trim(signal(name), top_db=top_db)[1].tolist()
            rows.append({"signal": name, "top_db": top_db, "start": start, "end": end})
    files = {}
    for path in sorted(CORPUS.rglob("*.flac")):
        whole, _ = librosa.load(path, sr=RATE)
        files[path.relative_to(CORPUS).as_posix()] = len(librosa.effects.trim(whole)[0])
    return {"librosa": librosa.__version__, "signals": rows, "files": files}


if __name__ == "__main__":
    print(json.dumps(table(), indent=1))
