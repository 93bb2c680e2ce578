"""Judges the embedded recogniser on texts and noise that it never met, and exports it if it passes.

python -m training.hearing.gates OUT/hearing.pt gates.json --library DIR [--export models/embedded/qwen3_asr]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.qwen3_asr.config import HOP, MIN_SAMPLES, N_FFT
from models.qwen3_asr.items import rows_of
from models.qwen3_asr.transcript import read_transcript
from training.hearing.network import END, PUBLISHED, SUFFIX, Features, Network, prefix_of, text_of
from training.hearing.sounds import ASKED, NOISES, SAMPLE_RATE, Maker, asked, words
from training.loop import device, hashes, publish, say
from training.voice import corpus, recogniser
from training.voice.flite import Flite
from training.voice.gates import HELD_OUT
from training.voice.texts import dictionary

WANTED = {"own sentences": 0.06, "noise": 0.1, "silence": 0.01, "own sentences refused": 0.005}
"""At most: words wrong, of what is no speech the share that is not refused, of speech the share that is."""
_TOGETHER, _MOST = 50, 160
Heard = list[tuple[str | None, str]]
"""Language and text of each item."""


class Listener:
    def __init__(self, state: dict[str, Tensor]) -> None:
        on = device()
        self._features, self._network = Features().to(on), Network().to(on).eval()
        self._network.load_state_dict(state)

    @torch.inference_mode()
    def __call__(self, waves: Sequence[np.ndarray]) -> Heard:
        """Waves int16 [n] -> the likeliest token after token."""
        heard: Heard = []
        for start in range(0, len(waves), _TOGETHER):
            heard += self._batch([wave.astype(np.float32) / 32768.0 for wave in waves[start : start + _TOGETHER]])
        return heard

    def _batch(self, waves: list[np.ndarray]) -> Heard:
        network, on = self._network, device()
        waves = [np.pad(wave, (0, max(0, MIN_SAMPLES - len(wave)))) for wave in waves]
        seconds = -(-max(map(len, waves)) // SAMPLE_RATE)
        seconds += -seconds % 8 if seconds > 8 else 0
        around = [np.pad(wave, N_FFT // 2, "reflect") for wave in waves]
        size = seconds * SAMPLE_RATE + N_FFT
        padded = torch.from_numpy(np.stack([np.pad(wave, (0, size - len(wave))) for wave in around])).to(on)
        frames = torch.tensor([len(wave) // HOP for wave in waves], device=on)
        counts = [rows_of(int(count)) for count in frames]
        rows, prefix = torch.tensor(counts, device=on), prefix_of()
        embeds, _ = network.thinker.audio_tower(self._features(padded, frames, torch.zeros_like(frames)), rows)
        begun = [[*prefix, *[0] * count, *SUFFIX] for count in counts]
        ids = torch.zeros((len(waves), max(map(len, begun)) + _MOST), dtype=torch.int64, device=on)
        for row, tokens in enumerate(begun):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        length, each = torch.tensor([len(tokens) for tokens in begun], device=on), torch.arange(len(waves), device=on)
        first, ended = length.clone(), torch.zeros(len(waves), dtype=torch.bool, device=on)
        while not ended.all() and int((length - first).max()) < _MOST:
            logits = network.thinker.model(
                ids[:, : int(length.max())], embeds, torch.full_like(rows, len(prefix)), rows
            )
            token = logits[each, length - 1].argmax(1)
            ids[each, length] = token
            ended |= token == END
            length += 1
        said = [text_of(ids[row, first[row] : length[row]].tolist()) for row in range(len(waves))]
        return [(read.language, read.text) for read in map(read_transcript, said)]


def wrong(wanted: Sequence[str], heard: Heard, same: Callable[[str], str]) -> float:
    """Words wrong per word that was said."""
    pairs = [(words(same(want)), words(same(text))) for want, (_, text) in zip(wanted, heard, strict=True)]
    return sum(recogniser.distance(*pair) for pair in pairs) / sum(len(want) for want, _ in pairs)


def refused(heard: Heard) -> float:
    return sum(language is None and not text for language, text in heard) / len(heard)


def measure(listen: Listener, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """What is known so far, again and again."""
    make, slt, other = Maker(options), Flite("slt", options.library), dictionary(options.words)
    found, random = dict[str, float](), np.random.default_rng(HELD_OUT)
    same = recogniser.load(torch.device("cpu")).same
    for kind in ASKED:
        chosen, alike = asked(kind, other)[: options.sentences], str if kind == "numbers" else same
        said = make.spoken(chosen, HELD_OUT)
        heard = listen([wave for _, wave, _ in said])
        found[f"own {kind}"] = wrong([text for text, _, _ in said], heard, alike)
        found[f"own {kind} refused"] = refused(heard)
        found[f"slt {kind}"] = wrong(chosen, listen([slt.speak(text).samples for text in chosen]), alike)
        yield found
        for (text, _, _), (_, transcript) in zip(said[:10], heard, strict=False):
            print(f"  {text} | {transcript}", flush=True)
        if kind == "sentences":
            waves = {"reversed": [wave[::-1].copy() for _, wave, _ in said]}
            for name in NOISES:
                made = [wave for seed in range(2) for _, wave, _ in make.noise(HELD_OUT + seed, (name,))]
                quiet = 1.0 if name == "silence" else 10.0 ** random.uniform(-1.5, 0.0)
                cut = (wave[: random.integers(8000, len(wave))] for wave in made for _ in range(4))
                waves[name] = [(wave * quiet).astype(np.int16) for wave in cut]
            found |= {name: 1.0 - refused(listen(part)) for name, part in waves.items()}
            found["noise"] = float(np.mean([found[name] for name in waves if name != "silence"]))
            yield found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("state", "out"):
        parser.add_argument(name, type=Path)
    corpus.source(parser)
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--device", type=torch.device, default=device(), help="where the voice speaks")
    parser.add_argument("--export", type=Path, help="directory of the checkpoint")
    options = parser.parse_args()
    trained = torch.load(options.state, map_location="cpu", weights_only=True)["model"]
    # The precision that is shipped is what is judged.
    state = {name: value.bfloat16() for name, value in trained.items()}
    for found in measure(Listener(state), options):
        passed = all(found.get(name, 1.0) <= most for name, most in WANTED.items())
        rounded = {name: round(value, 4) for name, value in found.items()}
        results = {"sha256": hashes(options.state), "wanted": WANTED, "passed": passed, **rounded}
        say(results)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.export and passed:
        publish(PUBLISHED, options.export, state)
