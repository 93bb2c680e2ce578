"""Qwen2-VL (arXiv:2409.12191): images and videos of any resolution, M-RoPE positions, the Qwen2 decoder. Qwen2.5-VL
(arXiv:2502.13923): window attention in the tower, absolute time in the positions of videos."""
