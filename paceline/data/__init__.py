"""Data: sets that answer by index; `cursor` and `loader` turn a position into batches."""
