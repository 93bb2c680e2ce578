"""Makes the embedded voice from nothing but Debian's packages flite and wamerican-small, on one GPU.

    python -m training.voice.make WORK [--go-on] [--export models/embedded/voxcpm2]

Flite speaks beside the training of the language model, as many processes as there are cores to spare; then the gates
judge it, and a voice that passes is exported. The published codec, which sounds its latents, is kept, and so is the
recogniser, which judges. Training runs by the clock and sums in the order in which files come, so another run is
another voice of the same kind, not the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from training.loop import WEIGHTS, publish
from training.voice import corpus
from training.voice.config import PUBLISHED

_ENDLESS = ("--files", 1_000_000)


def start(module: str, *arguments: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", f"training.voice.{module}", *map(str, arguments)], env=environment)


def finish(module: str, *arguments: object) -> None:
    """Raises CalledProcessError when the part fails."""
    process = start(module, *arguments)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, module)


def export(lm: Path, directory: Path) -> None:
    """The published checkpoint with the network of a trained state, without the references of built-in voices, which
    are those of other weights."""
    publish(PUBLISHED, directory, torch.load(lm, map_location="cpu", weights_only=True)["model"])


def make(options: argparse.Namespace) -> None:
    work: Path = options.work
    (work / "voice").mkdir(parents=True, exist_ok=True)
    source = ["--words", options.words, *(["--library", options.library] if options.library else [])]
    speakers = [
        start("corpus", work / "voice", *source, "--seed", 2001 + core, *_ENDLESS)
        for core in range(max(1, options.cores - 2))
    ]
    state = work / "lm" / "lm.pt"
    begun = state if state.exists() else PUBLISHED / WEIGHTS
    resume = ("--resume", begun, "--guided", 0.4) if options.go_on else ()
    try:
        finish("train", work / "voice", work / "lm", "--seconds", options.seconds, "--compile", *resume)
    finally:
        for process in speakers:
            process.terminate()
            process.wait()
    export(state, work / "checkpoint")
    finish("gates", work / "checkpoint", work / "gates.json", *source)
    scores = json.loads((work / "gates.json").read_text(encoding="utf-8"))
    failed = sorted(name for name, values in scores.items() if name.startswith("sentences") and not values["passed"])
    if failed:
        raise SystemExit(f"the gates are not met, nothing is exported: {', '.join(failed)}")
    if options.export:
        export(state, options.export)
        finish("built_in_voices", options.export)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="directory for data and states")
    parser.add_argument("--export", type=Path, help="directory of the checkpoint")
    parser.add_argument("--go-on", action="store_true", help="from WORK's state, else from the published weights")
    corpus.source(parser)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=2000.0, help="of training")
    make(parser.parse_args())
