"""What is trained: model, data and loss behind one seam. `base` is the seam, one file a workload."""
