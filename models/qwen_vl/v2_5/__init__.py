"""Qwen2.5-VL (arXiv:2502.13923): window attention in the tower, absolute time in the positions of videos."""
