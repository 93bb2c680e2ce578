"""Qwen2-VL (arXiv:2409.12191): images and videos of any resolution, M-RoPE positions, the Qwen2 decoder."""
