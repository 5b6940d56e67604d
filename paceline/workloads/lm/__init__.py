"""The language model that most recipes train: config, model, workload."""
