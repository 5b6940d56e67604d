"""telemetry.csv: what GPU and host do while training runs, sampled by one thread a machine."""

import csv
import os
import time
from pathlib import Path
from typing import Any

import psutil

from paceline.machine.gpus import Nvml
from paceline.train.heartbeat import Ticker

COLUMNS = (
    "time", "source", "utilisation_percent", "memory_bytes", "clock_mhz", "power_w",
    "temperature_c", "rss_bytes",
)  # fmt: skip


class Telemetry(Ticker):
    """A row for the host and one for each GPU that this run may use."""

    def __init__(self, path: Path, interval_s: float) -> None:
        super().__init__(interval_s, "telemetry")
        self._file = path.open("a", buffering=1, newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        if path.stat().st_size == 0:
            self._writer.writerow(COLUMNS)
        self._process = psutil.Process(os.getpid())
        self._nvml = Nvml.open()
        psutil.cpu_percent(interval=None)  # the first call only sets the reference point

    def tick(self) -> None:
        now = round(time.time(), 3)
        self._writer.writerow((now, "host", *self._host()))
        for handle in self._nvml.handles if self._nvml else []:
            self._writer.writerow((now, f"gpu{handle.index}", *_gpu_row(handle.sample())))

    def _host(self) -> tuple[Any, ...]:
        used = psutil.virtual_memory().used
        rss = self._process.memory_info().rss
        return psutil.cpu_percent(interval=None), used, "", "", "", rss


def _gpu_row(sample: dict[str, float]) -> tuple[Any, ...]:
    names = ("utilisation_percent", "memory_bytes", "clock_mhz", "power_w", "temperature_c")
    return (*(sample.get(name, "") for name in names), "")
