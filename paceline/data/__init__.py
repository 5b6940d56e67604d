"""Data: sets that answer by index, and streams; `cursor` and `loader` turn a position into batches.

`from paceline.data import pad` is for a job's `collate`.
"""

from paceline.data.padding import pad

__all__ = ["pad"]
