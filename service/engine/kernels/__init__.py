"""Triton kernels of the engine; each has a twin in plain PyTorch."""
