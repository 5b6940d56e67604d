"""Text from what was trained: a run's checkpoint, or a model of transformers."""
