"""Speech and its words, drawn together in one space: config, models, loss, workload."""
