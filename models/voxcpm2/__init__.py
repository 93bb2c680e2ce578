"""VoxCPM2: text and voice clips to 48 kHz speech."""
