"""Data sets by index, and streams; `cursor` and `loader` turn a position in the run into batches.

`from paceline.data import pad` is for a job's `collate`.
"""

from paceline.data.padding import pad

__all__ = ["pad"]
