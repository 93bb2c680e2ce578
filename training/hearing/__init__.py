"""The embedded recogniser: a Qwen3-ASR of 3.9 million parameters, trained on generated speech."""
