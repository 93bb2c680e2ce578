"""What the API process and the engine process know of each other."""
