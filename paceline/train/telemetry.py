"""telemetry.csv: what GPU and host do while training runs, sampled by one thread a machine."""

import os
import time
from pathlib import Path

import psutil

from paceline.machine.gpus import Nvml
from paceline.records.tables import MEASURES, TELEMETRY, TableFile
from paceline.train.heartbeat import Ticker


class Telemetry(Ticker):
    """A row for the host and one for each GPU that this run may use."""

    def __init__(self, path: Path, interval_s: float) -> None:
        super().__init__(interval_s, "telemetry")
        self._file = TableFile(path, TELEMETRY)
        self._process = psutil.Process(os.getpid())
        self._nvml = Nvml.open()
        psutil.cpu_percent(interval=None)  # the first call only sets the reference point

    def tick(self) -> None:
        now = f"{time.time():.3f}"
        self._file.add({"time": now, "source": "host", **self._host()})
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
