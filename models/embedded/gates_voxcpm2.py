"""Judges a trained voice: its sentences and Flite's of the same texts through the recogniser, for several seeds.

    python -m models.embedded.gates_voxcpm2 LM CODEC RECOGNISER OUT --seeds 10 --sentences 500

LM and CODEC are a checkpoint's model.safetensors and audiovae.safetensors, or the states that the trainings left.
With --natural natural speech alone is judged, as it is and as the codec sounds it; LM is not read.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.embedded.voices import training
from models.embedded.voices.codec import Codec
from models.embedded.voices.config import AUDIO_START, CONFIG, REFERENCE_END, REFERENCE_START, tokens
from models.embedded.voices.corpus import Listener, Spoken, prepare
from models.embedded.voices.flite import Flite
from models.embedded.voices.gauge import Take, exchanged, nearer, score
from models.embedded.voices.latents import FRAMES, LATENT_DIM
from models.embedded.voices.network import Network
from models.embedded.voices.reading import LEAST, Reading, edited, follow
from models.embedded.voices.recogniser import Recogniser
from models.embedded.voices.recogniser import load as load_recogniser
from models.embedded.voices.resampling import down
from models.embedded.voices.sampler import Prompt, Sampler, Settings
from models.embedded.voices.sentences import Writer
from models.embedded.voices.served import Served, Speech
from models.embedded.voices.words import dictionary

HELD_OUT = 900_000_017
"""Seed of the sentences; those of the training are below a hundred million."""
MODES = ("plain", "described", "reference", "continuation")
_NOTICED = 5
"""Phones of a part that the measure of repeats and skips must notice; some of shorter ones it misses."""
_TOGETHER = 256
"""Prompts in one batch."""


@dataclass(frozen=True, eq=False)
class Judge:
    network: Network
    codec: Codec
    recogniser: Recogniser
    device: torch.device

    def hear(self, wave: Tensor) -> str:
        """wave float32 [n] at 16 kHz."""
        return self.recogniser(wave)

    def read(self, wave: Tensor, sounds: np.ndarray) -> Reading:
        """wave as in `hear`; sounds: phones of natural speech of the text, frame by frame."""
        text = sounds[np.flatnonzero(np.diff(sounds.astype(int), prepend=-1))]
        return follow(self.recogniser.phones(wave), text, self.recogniser.known)

    @torch.no_grad()
    def sound(self, patches: Tensor) -> Tensor:
        """[n, P, D] -> samples at 48 kHz."""
        return self.codec.decoder(patches.flatten(0, 1).T[None].to(self.device))[0, 0]

    @torch.no_grad()
    def encode(self, wave: np.ndarray) -> Tensor:
        """int16 [n], a whole number of patches -> [patches, P, D]."""
        latents = self.codec.encoder(torch.from_numpy(wave).to(self.device).float()[None, None] / 32768.0)
        return latents[0].T.reshape(-1, FRAMES, LATENT_DIM)


def load(lm: Path | None, codec: Path, recogniser: Path, device: torch.device) -> Judge:
    def fill(module: torch.nn.Module, state: dict[str, Tensor]) -> None:
        wide = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
        module.load_state_dict(wide)
        module.to(device).eval().requires_grad_(False)

    judge = Judge(Network(CONFIG), Codec(CONFIG["audio_vae_config"]), load_recogniser(recogniser, device), device)
    if lm:
        fill(judge.network, tensors(lm, "model", "network."))
    fill(judge.codec, tensors(codec, "codec"))
    return judge


def tensors(file: Path, part: str, prefix: str = "") -> dict[str, Tensor]:
    """Of a checkpoint's safetensors file all, of a training's state those of `part` that begin with `prefix`."""
    if file.suffix == ".safetensors":
        return load_file(file)
    state: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)[part]
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def texts(kind: str, count: int, other: tuple[str, ...]) -> list[str]:
    """sentences: of the grammar, three words or more, no digits; words: strings of known words; other: of words of the
    list; numbers."""
    writer = Writer(HELD_OUT, other)
    found: list[str] = []
    makers = {
        "sentences": writer.sentence,
        "words": writer.known_words,
        "other": writer.mixed_string,
        "numbers": writer.numbered,
    }
    while len(found) < count:
        text = makers[kind]()
        digits = any(character.isdigit() for character in text)
        if len(text.split()) >= 3 and digits == (kind == "numbers") and text not in found:
            found.append(text)
    return found


def prompts(
    judge: Judge, mode: str, chosen: list[str], natural: list[Spoken], description: str, seed: int
) -> list[Prompt]:
    """The server's layouts; the clip is the natural speech of the sentence before."""
    made = []
    for index, text in enumerate(chosen):
        front, clip = (f"({description})" if mode == "described" else ""), natural[index - 1]
        patches = (
            judge.encode(clip.wave).cpu()
            if mode in ("reference", "continuation")
            else torch.zeros(0, FRAMES, LATENT_DIM)
        )
        before = [REFERENCE_START, *[0] * len(patches), REFERENCE_END] if mode == "reference" else []
        words = tokens(f"{clip.text} {text}" if mode == "continuation" else f"{front}{text}")
        behind = [0] * len(patches) if mode == "continuation" else []
        ids = torch.tensor([*before, *words, AUDIO_START, *behind])
        is_patch = torch.zeros(len(ids), dtype=torch.bool)
        is_patch[1 : 1 + len(patches)] = mode == "reference"
        is_patch[len(ids) - len(behind) :] = True
        limit = 6 * len(tokens(front + text)) + 10
        made.append(Prompt(ids, is_patch, patches, seed * 100_000 + index, limit, continued=mode == "continuation"))
    return made


class Voice:
    """Speaks by the sampler and the trained codec, or by the server's own model when its directory is given."""

    def __init__(self, judge: Judge, settings: Settings, served: Path | None) -> None:
        self._judge = judge
        self._served = Served(served, settings) if served else None
        self._sampler = Sampler(judge.network, settings)

    def speak(self, asked: list[Prompt]) -> Iterator[Speech]:
        for start in range(0, len(asked), _TOGETHER):
            some = asked[start : start + _TOGETHER]
            if self._served is not None:
                yield from self._served.speak(some)
                continue
            for patches, stopped in self._sampler.speak(some):
                yield Speech(patches, self._judge.sound(patches), stopped)


def takes(judge: Judge, speeches: Iterable[Speech], natural: list[Spoken], heard: list[str]) -> list[Take]:
    made = []
    for speech, clip, natural_heard in zip(speeches, natural, heard, strict=True):
        wave = down(speech.samples[None].to(judge.device))[0]
        made.append(
            Take(
                judge.recogniser.same(clip.spoken),
                judge.hear(wave),
                judge.read(wave, clip.sounds),
                len(speech.patches),
                speech.stopped,
                natural_heard,
                len(clip.span),
            )
        )
    return made


class Source:
    """Natural speech of texts, and what the recogniser hears of it."""

    def __init__(self, judge: Judge, options: argparse.Namespace) -> None:
        self._judge = judge
        self._speaker, self._listener = Flite("slt", options.library), Listener(options.basis)

    def speak(self, texts: list[str]) -> tuple[list[Spoken], list[str]]:
        spoken = [prepare(text, self._speaker.speak(text), self._listener, keep_wave=True) for text in texts]
        waves = (torch.from_numpy(clip.wave).to(self._judge.device).float() / 32768.0 for clip in spoken)
        return spoken, [self._judge.hear(wave) for wave in waves]

    def noticed(self, chosen: list[str]) -> dict[str, float | bool]:
        """Shares of natural speech in which a repeat or skip is found, with parts of _NOTICED phones and more left out
        or said twice; of natural speech as it is, whatever its length."""
        drawn, found = random.Random(HELD_OUT), defaultdict[str, list[bool]](list)
        for text in chosen:
            natural = self._speaker.speak(text)
            for name, phones, samples in (("natural", 0, natural.samples), *edited(natural, drawn)):
                wave = torch.from_numpy(samples).to(self._judge.device).float() / 32768.0
                reading = self._judge.read(wave, natural.phones)
                if name == "natural":
                    found[name].append(max(reading.skipped, reading.repeated) >= LEAST)
                elif phones >= _NOTICED:
                    found[name].append(reading.faulty(len(samples), len(natural.samples)))
        shares = {name: sum(values) / len(values) for name, values in found.items()}
        passed = all(share < 0.01 if name == "natural" else share >= 0.95 for name, share in shares.items())
        return {**{name: round(share, 4) for name, share in shares.items()}, "passed": passed}

    def exchanges(self, chosen: list[str]) -> dict[str, float | bool]:
        """How often a word is heard that was said in the place of the written one: the recogniser's model of language
        must not put things right."""
        drawn, same = random.Random(HELD_OUT), self._judge.recogniser.same
        spoken, heard = self.speak([exchanged(text, drawn) for text in chosen])
        pairs = zip(spoken, heard, chosen, strict=True)
        share = sum(nearer(h, same(clip.spoken), same(text)) for clip, h, text in pairs) / len(chosen)
        return {"heard": round(share, 4), "passed": share >= 0.9}


def run(options: argparse.Namespace) -> None:
    judge = load(None if options.natural else options.lm, options.codec, options.recogniser, training.device())
    source, other = Source(judge, options), dictionary(options.words)
    results: dict[str, object] = {}
    if options.checkpoint:
        files = sorted(options.checkpoint.glob("*.safetensors"))
        results["sha256"] = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    def report(name: str, values: dict[str, float | bool]) -> None:
        results[name] = values
        print(json.dumps({name: values}), flush=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    for kind in options.kinds:
        chosen = texts(kind, options.sentences, other)
        natural, heard = source.speak(chosen)
        if options.natural or (kind == options.kinds[0] and options.codec_alone):
            copies = (judge.encode(clip.wave) for clip in natural)
            codec = (Speech(patches, judge.sound(patches), True) for patches in copies)
            report(f"{kind} codec", score(takes(judge, codec, natural, heard)).as_json())
            report(f"{kind} exchanged", source.exchanges(chosen))
            report(f"{kind} noticed", source.noticed(chosen))
        if not options.natural:
            generate(judge, options, kind, (chosen, natural, heard), report)


def generate(
    judge: Judge,
    options: argparse.Namespace,
    kind: str,
    material: tuple[list[str], list[Spoken], list[str]],
    report: Callable[[str, dict[str, float | bool]], None],
) -> None:
    """Speech of the trained voice in each mode, the plain one of the first kind for each seed."""
    chosen, natural, heard = material
    voice = Voice(judge, Settings(options.cfg, options.steps, options.temperature), options.served)
    for mode in options.modes if kind == options.kinds[0] else MODES[:1]:
        count = options.seeds if (mode, kind) == (MODES[0], options.kinds[0]) else 1
        for seed in range(options.first_seed, options.first_seed + count):
            asked = prompts(judge, mode, chosen, natural, "a young woman, speaking softly", seed)
            done = takes(judge, voice.speak(asked), natural, heard)
            report(f"{kind} {mode} {seed}", score(done).as_json())
            for take in done[: options.show] if seed == options.first_seed else []:
                print(f"  {take.spoken} | {take.heard}", flush=True)
            for take in done:
                if take.repeats_or_skips:
                    lengths = f"{take.patches} patches, {take.natural_patches} in natural speech"
                    print(f"  a repeat or a skip, seed {seed}: {take.spoken} | {take.heard} | {lengths}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("lm", "codec", "recogniser", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--library", type=Path, help="directory of libflite's files; default: where the linker looks")
    parser.add_argument("--words", type=Path, default=Path("/usr/share/dict/american-english-small"))
    parser.add_argument("--basis", type=Path, default=Path(__file__).parent / "voices" / "basis.npz")
    parser.add_argument("--kinds", nargs="+", default=["sentences", "words", "other"])
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--served", type=Path, help="a checkpoint whose model of the server's is to speak")
    parser.add_argument("--checkpoint", type=Path, help="what LM and CODEC were exported to: its hashes go to OUT")
    parser.add_argument("--natural", action="store_true", help="natural speech alone, without a language model")
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0, help="processes side by side take some seeds each")
    parser.add_argument("--no-codec-alone", dest="codec_alone", action="store_false", help="nor exchanged words")
    parser.add_argument("--cfg", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--show", type=int, default=8)
    options = parser.parse_args()
    run(options)


if __name__ == "__main__":
    main()
