"""What the workloads with models of transformers share: building, loading and saving them."""
