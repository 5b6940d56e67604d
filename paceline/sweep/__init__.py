"""A matrix of runs: which cells there are, in which order they run, and what came of them."""
