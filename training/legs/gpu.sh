#!/bin/bash
# gpu.sh SECONDS, in the folder of eye.sh and voice.sh on a GPU machine of 16 cores: both legs side by side on one GPU
# (15 and 9 steps a second on an H200), detached. OUT/eye and OUT/voice have their results.
GATE_QUESTIONS=200 WORKERS=8 setsid bash eye.sh "$OUT/eye" "$1" 1e-3 < /dev/null > /dev/null 2>&1 &
setsid bash voice.sh "$OUT/voice" "$1" 1.2e-3 6 < /dev/null > /dev/null 2>&1 &
