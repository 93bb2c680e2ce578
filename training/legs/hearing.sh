#!/bin/bash
# leg.sh OUT SECONDS CORES [RESUME]: one leg of the recogniser's training on one GPU, from the repository's root.
# All of it takes SECONDS, the gates at its end included. The state also stays in $PWD/ear/last.pt for the next leg.
set -e
begun=$(date +%s)
out=$(mkdir -p "$1" && cd "$1" && pwd); seconds=$2; cores=$3; resume=$4
root=$(cd "$(dirname "$0")/.." && pwd); work=${WORK:-$PWD/ear}
mkdir -p $work/tree $work/data $work/flite
cp -r "$root/models" "$root/training" $work/tree/
tar xJf "$root/.ear/ear.tar.xz" -C $work/tree
[ -f $work/flite/american-english-small ] || tar xJf "$root/flite.tar.xz" -C $work/flite
cd $work/tree
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
source="--library $work/flite --words $work/flite/american-english-small"
leg=$(($(ls $work/data | wc -l) > 0 ? 1 : 0)); seed=$((1 + 100 * leg + RANDOM % 20 * 200))
sounds() { python3 -m training.hearing.sounds "$@" $source >> "$out/sounds.log" 2>&1; }
pids=""
( sounds own $work/data --seed $seed --files ${OWN_FILES:-40} --device cuda \
  || { echo "the voice does not run on the GPU" >> "$out/sounds.log"; for n in 1 2 3 4; do sounds own $work/data --seed $((seed + 50 + n)) --files 100000 --device cpu & done; wait; } ) & pids="$pids $!"
sounds noise $work/data --seed $seed --files 300 & pids="$pids $!"
for n in $(seq 1 $((cores - 3))); do sounds voices $work/data --seed $((seed + n)) --files 100000 & pids="$pids $!"; done
trap 'for p in $pids; do for c in $(pgrep -P $p); do for d in $(pgrep -P $c); do kill $d; done; kill $c; done; kill $p; done 2>/dev/null' EXIT
train=$((seconds - ${GATES:-110} - ($(date +%s) - begun)))
python3 -m training.hearing.train $work/data "$out" --seconds $train --hours ${HOURS:-250} --rate ${RATE:-2e-3} --audio ${AUDIO:-576} \
  --seed $seed ${resume:+--resume "$resume"} 2>&1 | tee -a "$out/train.log" | tail -n 400
cp "$out/hearing.pt" $work/last.pt
left=$((seconds - ($(date +%s) - begun)))
timeout $((left > 20 ? left : 20)) python3 -m training.hearing.gates "$out/hearing.pt" "$out/gates.json" $source \
  --sentences ${SENTENCES:-200} --device ${VOICE_DEVICE:-cuda} 2>&1 | tee "$out/gates.log" || true
echo "done in $(($(date +%s) - begun)) s, $(ls $work/data | wc -l) files"
