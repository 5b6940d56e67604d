"""The time of day for records, such that it never jumps.

Deadlines are kept by `time.monotonic`. But records have moments too, and differences of those are
shown as durations, or decide which of two ranks failed first. Somebody who sets the clock while a
run goes on, by hours and in either direction, must not change them.
"""

import time


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while a laptop sleeps


_BOOTED_AT = time.time() - _since_boot()


def wall_time() -> float:
    """Return seconds since 1970 as `time.time` does, by the clock as it was set when this process
    began: ranks have that of the server they are forked from."""
    return _BOOTED_AT + _since_boot()
