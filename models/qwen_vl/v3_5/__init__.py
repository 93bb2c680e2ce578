"""Qwen3.5, 3.6 and 3.8, dense and mixture of experts: pictures, videos and tower of Qwen3-VL without DeepStack, and a
language model of Gated DeltaNet layers (arXiv:2412.06464) with a gated attention in every fourth."""
