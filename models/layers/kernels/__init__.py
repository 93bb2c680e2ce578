"""Triton kernels for NVIDIA GPUs of compute capability 8.0 and later.

Each kernel has a plain PyTorch reference, which says what it computes and runs where a GPU refuses the kernel. All are
safe inside a capture: grids follow from shapes alone, everything else is read on the device.
"""
