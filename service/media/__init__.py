"""Pictures, videos and audio: fetching, decoding, encoding, each bounded. Imports no torch."""
