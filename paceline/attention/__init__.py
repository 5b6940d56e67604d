"""Native sparse attention (arXiv 2502.11089): three views of the past, added by learned gates.

    sizes      l, d, l', n and w, and what follows from them; no torch
    plain      all of it in torch's own operations: the CPU path, and the reference of kernels
    ranges     chosen blocks as token ranges, spelt out (v1) and in tensor operations (v2)
    banded     Triton: queries see a band of keys (the window; compressed keys of documents)
    folded     cuDNN: compressed keys as causal attention, on Hopper
    scores     Triton: which blocks a query chooses, without the square of scores
    selected   Triton: attention over chosen blocks; lists: which queries chose a block
    blended    Triton: the sum of branches by their gates, and the gates' gradient
    ops        the kernels as operations of torch, with their gradients; which is used when
    decode     one more token, from a cache
    stats      gates and choices in a few numbers
    crossover  from which length on it is faster than dense attention on this GPU, measured once
    marks      names of its parts in profiles
    flash3     beside it: FlashAttention 3 as SDPA's kernel

docs/nsa.md has the formulas and the figures.
"""
