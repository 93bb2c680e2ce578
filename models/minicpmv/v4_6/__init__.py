"""MiniCPM-V 4.6 and 4.7: a tower that merges windows of patches on its way, and the language model of Qwen3.5."""
