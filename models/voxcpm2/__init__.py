"""VoxCPM2: text and reference audio to 48 kHz speech."""
