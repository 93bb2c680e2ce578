#!/bin/bash
# voice.sh OUT SECONDS RATE SPEAKERS, in a folder with models, training, flite (its libraries and american-english-small)
# and voice.pt: one leg of the embedded voice beside so many speaking processes, then its gates.
cd "$(dirname "$0")"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=$PWD:${PYTHONPATH:-} PYTHONUNBUFFERED=1
out=$1; mkdir -p "$out/speech"
source="--library $PWD/flite --words $PWD/flite/american-english-small"
pids=""
for n in $(seq 1 "$4"); do
  python3 -m training.voice.corpus "$out/speech" $source --seed $((7000 + RANDOM % 2000 + 10000 * n)) --files 1000000 --echoes 0.1 >> "$out/speakers.log" 2>&1 & pids="$pids $!"
done
OMP_NUM_THREADS=2 python3 -m training.voice.train "$out/speech" "$out" --seconds "$2" --rate "$3" --resume voice.pt --guided 1.0 --keep 60 --compile > "$out/train.log" 2>&1
kill $pids
python3 -c "from pathlib import Path; from training.voice.make import export; export(Path('$out/lm.pt'), Path('$out/checkpoint'))"
for kinds in "sentences" "first_words --modes plain" "segments_400 words unheard --modes plain"; do
  python3 -m training.voice.gates "$out/checkpoint" "$out/gates_${kinds%% *}.json" $source --kinds $kinds > "$out/gates_${kinds%% *}.log" 2>&1 &
done
wait
