"""Kernels of our own, where torch's cost more than they must: Triton on GPUs, and the same
arithmetic in plain torch beside each, with which the tests compare them. `plan/kernels.py` decides
where they are used, and says why. Models import what they use when they are built, as Triton only
exists where torch has CUDA."""
