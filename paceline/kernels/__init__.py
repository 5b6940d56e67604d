"""Kernels of our own, where torch's cost more than they must: Triton on GPUs, and the same
arithmetic in plain torch beside each, which the tests hold them against. `plan/kernels.py` decides
where they are used, and says why. Models import what they use when they are built, for Triton is
only where torch has CUDA."""
