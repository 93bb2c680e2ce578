"""Kimi-VL-A3B: MoonViT with its projector, a DeepSeek-V3 style language model with latent attention and experts."""
