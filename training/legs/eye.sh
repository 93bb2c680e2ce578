#!/bin/bash
# eye.sh OUT SECONDS RATE, in a folder with models, training, fonts (make fonts), outside and this folder's files: one leg
# of the embedded model that sees, from eye.safetensors, then its gates. GATE_QUESTIONS, WORKERS: see eye.py.
cd "$(dirname "$0")"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=$PWD:${PYTHONPATH:-} REPRISE_WORLD_FONTS=$PWD/fonts PYTHONUNBUFFERED=1
mkdir -p "$1"; exec python3 eye.py "$1" "$2" "$3" "$PWD/eye.safetensors" > "$1/leg.txt" 2>&1
