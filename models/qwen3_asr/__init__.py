"""Qwen3-ASR (arXiv:2601.21337): speech to text, with an audio tower before the Qwen3 decoder."""
