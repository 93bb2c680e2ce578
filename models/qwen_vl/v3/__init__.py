"""Qwen3-VL (arXiv:2511.21631), dense and mixture of experts: the pictures of Qwen2-VL, a tower with a learned position
table, DeepStack features for the first language-model layers, the Qwen3 decoder with interleaved M-RoPE."""
