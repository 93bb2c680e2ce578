"""Triton kernels for NVIDIA GPUs; nothing outside this package imports triton.

Each kernel has a plain PyTorch twin in models/, which says what it computes. All are safe inside a recording: grids
follow from shapes alone, everything else is read on the device.
"""
