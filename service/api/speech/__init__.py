"""Speech routes, voices and delivery of audio."""
