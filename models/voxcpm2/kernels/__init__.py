"""Triton kernels of VoxCPM2 alone: its step's inputs, its flow solver and its codec."""
