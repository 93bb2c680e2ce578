"""MiniCPM-V 2.5, 2.6, 4.0 and 4.5: a NaViT SigLIP tower and a resampler before a causal language model."""
