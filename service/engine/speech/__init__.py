"""Speech in the engine: when each stream may use the GPU (scheduler), and what runs when it does (worker)."""
