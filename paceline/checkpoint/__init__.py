"""A run's state on disk: written whole or not at all, checked before it is believed.

pieces (what an engine holds) -> tensors (a file of them) -> folder (steps, pointers, retention)
saver: all ranks write one together;  restore: all ranks choose and read one together
"""
