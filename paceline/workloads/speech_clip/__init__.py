"""Speech and its words, embedded in one space: config, models, loss, workload."""
