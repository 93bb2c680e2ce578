"""Chat models in the engine: requests in, tokens out."""
