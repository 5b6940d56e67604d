"""telemetry.csv: what GPUs, host and ranks do while training runs, sampled by a thread a rank."""

import os
import time
from pathlib import Path

import psutil

from paceline.machine.gpus import Nvml
from paceline.records.tables import MEASURES, TELEMETRY, TableFile
from paceline.train.heartbeat import Ticker


class Telemetry(Ticker):
    """The first rank of a machine samples the host and each GPU that this run may use; the others
    only their own memory."""

    def __init__(self, path: Path, interval_s: float, is_first: bool) -> None:
        super().__init__(interval_s, "telemetry")
        self._file = TableFile(path, TELEMETRY)
        self._process = psutil.Process(os.getpid())
        self._is_first = is_first
        self._nvml = Nvml.open() if is_first else None
        psutil.cpu_percent(interval=None)  # the first call only sets the reference point

    def tick(self) -> None:
        now = f"{time.time():.3f}"
        if self._is_first:
            self._file.add({"time": now, "source": "host", **self._host()})
        else:
            rss_bytes = self._process.memory_info().rss
            self._file.add({"time": now, "source": "rank", "rss_bytes": rss_bytes})
        for handle in self._nvml.handles if self._nvml else []:
            sample = handle.sample()
            known = {name: sample.get(name) for name in MEASURES}
            self._file.add({"time": now, "source": f"gpu{handle.index}", **known})
        self._file.flush()

    def _host(self) -> dict[str, float]:
        return {
            "utilisation_percent": psutil.cpu_percent(interval=None),
            "memory_bytes": psutil.virtual_memory().used,
            "rss_bytes": self._process.memory_info().rss,
        }
