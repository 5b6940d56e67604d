"""Any causal language model of transformers: config, model, workload."""
