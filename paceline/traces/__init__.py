"""Chrome traces of torch's profiler, as numbers: kernels by category, the longest ones,
communication that nothing hides, gaps in which a GPU waits for its host. Files in, a record out, no
torch."""
