"""Baseline against optimized: pairs of configs in targets/*.yaml, proven to do equal work, run
interleaved, judged with an interval. `paceline bench run zero3`."""
