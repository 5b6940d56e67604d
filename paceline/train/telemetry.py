"""telemetry.csv: what GPUs, host and ranks do while training runs, sampled by a thread a rank."""

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
    """The first rank of a machine samples the host and each GPU that this run may use; the others
    only their own memory."""

    def __init__(self, path: Path, interval_s: float, is_first: bool) -> None:
        super().__init__(interval_s, "telemetry")
        self._file = path.open("a", buffering=1, newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        if path.stat().st_size == 0:
            self._writer.writerow(COLUMNS)
        self._process = psutil.Process(os.getpid())
        self._is_first = is_first
        self._nvml = Nvml.open() if is_first else None
        psutil.cpu_percent(interval=None)  # the first call only sets the reference point

    def tick(self) -> None:
        now = round(time.time(), 3)
        if self._is_first:
            self._writer.writerow((now, "host", *self._host()))
        else:
            self._writer.writerow((now, "rank", *[""] * 5, self._process.memory_info().rss))
        for handle in self._nvml.handles if self._nvml else []:
            self._writer.writerow((now, f"gpu{handle.index}", *_gpu_row(handle.sample())))

    def _host(self) -> tuple[Any, ...]:
        used = psutil.virtual_memory().used
        rss = self._process.memory_info().rss
        return psutil.cpu_percent(interval=None), used, "", "", "", rss


def _gpu_row(sample: dict[str, float]) -> tuple[Any, ...]:
    names = ("utilisation_percent", "memory_bytes", "clock_mhz", "power_w", "temperature_c")
    return (*(sample.get(name, "") for name in names), "")
