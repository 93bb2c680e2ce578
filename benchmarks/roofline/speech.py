"""Rooflines of VoxCPM2's decode steps."""

from __future__ import annotations

FLOOR_MS = {1: 2.54, 2: 2.54, 4: 2.55, 8: 2.56, 16: 2.6, 32: 5.14, 64: 9.06, 128: 16.96, 256: 32.8}
"""By streams: 7.6 GB at 3.0 TB/s, from 32 streams on 87.8 GFLOP a stream at 700 TFLOP/s; the codec not counted. Beyond
64 the language models' weights and cache at that speed, and 84.3 GFLOP a stream."""
