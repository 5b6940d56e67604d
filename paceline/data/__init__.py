"""Data: sets that answer by index, and `cursor` and `loader`, which turn a position into batches."""
