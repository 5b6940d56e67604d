"""Masked autoencoder of transformers: config, model, data, workload."""
