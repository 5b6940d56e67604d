"""What is trained: model, data and loss. `base` is the seam, then one file a workload."""
