"""The drawn world that the embedded chat model sees, its training and its gates."""
