"""Makes the embedded voice from nothing but Debian's packages flite and wamerican-small, on one GPU.

    python -m models.embedded.make_voice WORK [--export models/embedded/voxcpm2]

Flite speaks beside the training, as many processes as there are cores to spare. The parts are trained one
after the other, then the gates judge them; a voice that passes is exported. Training runs by the clock and sums in the
order in which files come, so another run is another voice of the same kind, not the same bytes.

With --rhvoice the recogniser, which only judges, learns from two more speakers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_MANY = "1000000"
_ECHOES = 0.1
"""Share of the voice's texts in which words are said again or follow others that are like them."""
_OTHERS = (("rms",), ("awb",), ("kal16", "--varied"), ("clb", "--varied"), ("bdl", "--varied"))
"""Voices that the recogniser learns from, the last two with RHVoice alone."""


def start(module: str, *arguments: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", f"models.embedded.{module}", *map(str, arguments)], env=environment)


def finish(module: str, *arguments: object) -> None:
    """Raises CalledProcessError when the part fails."""
    process = start(module, *arguments)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, module)


def generators(work: Path, cores: int, source: Sequence[str], rhvoice: Path | None) -> list[subprocess.Popen[bytes]]:
    """Processes that speak until they are stopped: the voice itself, others for the recogniser, and sentences that the
    recogniser is tried on."""
    corpus = "voices.corpus"
    endless = ("--files", _MANY, "--waves", 8, "--echoes", _ECHOES)
    running = [
        start(corpus, work / "voice", *source, "--seed", 2001 + core, *endless) for core in range(max(1, cores - 6))
    ]
    source = [*source, *(["--rhvoice", str(rhvoice)] if rhvoice else [])]
    for number, (voice, *varied) in enumerate(_OTHERS if rhvoice else _OTHERS[:3]):
        files = ("--files", 400, "--waves", 400, *varied)
        running.append(start(corpus, work / "others", *source, "--voice", voice, "--seed", 3001 + 50 * number, *files))
        own = ("--files", 2, "--waves", 2, "--grammar", "--exchanged")
        running.append(start(corpus, work / "own" / voice, *source, "--voice", voice, "--seed", 901, *own))
    for kind in ("grammar", "strings"):
        natural = ("--seed", 777, "--files", 4, "--waves", 4, f"--{kind}")
        running.append(start(corpus, work / "natural" / kind, *source, *natural))
    return running


def run(options: argparse.Namespace) -> None:
    work: Path = options.work
    own = (f"own/{voice}" for voice, *_ in _OTHERS)
    for name in ("voice", "others", "natural/grammar", "natural/strings", *own):
        (work / name).mkdir(parents=True, exist_ok=True)
    source = ["--words", str(options.words), *(["--library", str(options.library)] if options.library else [])]
    running = generators(work, options.cores, source, options.rhvoice)
    try:
        heard = ["--seconds", options.recogniser_seconds]
        for kind in ("grammar", "strings"):
            heard += ["--test", work / "natural" / kind]
        for voice, *_ in _OTHERS if options.rhvoice else _OTHERS[:3]:
            heard += ["--own", work / "own" / voice]
        heard += ["--library", options.library] if options.library else []
        finish("train_recogniser", work / "others", work / "recogniser", *heard)
        finish("train_codec", work / "voice", work / "codec", "--seconds", options.codec_seconds, "--compile")
        finish("train_voxcpm2", work / "voice", work / "lm", "--seconds", options.lm_seconds, "--compile")
    finally:
        for process in running:
            process.terminate()
            process.wait()
    found = sorted((work / "recogniser").glob("heard-own-*.npz"))
    finish("tune_recogniser", work / "recogniser", *found, "--most", 40, "--cores", options.cores)
    lm, codec = work / "lm" / "lm.pt", work / "codec" / "codec.pt"
    finish("voices.export", lm, codec, work / "checkpoint")
    judged = ("--checkpoint", work / "checkpoint")
    finish("gates_voxcpm2", lm, codec, work / "recogniser", work / "gates.json", *source, *judged)
    scores = json.loads((work / "gates.json").read_text(encoding="utf-8"))
    del scores["sha256"]
    failed = sorted(name for name, values in scores.items() if name.startswith("sentences") and not values["passed"])
    if failed:
        raise SystemExit(f"the gates are not met, nothing is exported: {', '.join(failed)}")
    if options.export:
        finish("voices.export", lm, codec, options.export)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="directory for data and states")
    parser.add_argument("--export", type=Path, help="directory of the checkpoint")
    parser.add_argument("--library", type=Path, help="directory of libflite's files; default: where the linker looks")
    parser.add_argument("--rhvoice", type=Path, help="directory of RHVoice with two more voices for the recogniser")
    parser.add_argument("--words", type=Path, default=Path("/usr/share/dict/american-english-small"))
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--recogniser-seconds", type=float, default=300.0)
    parser.add_argument("--codec-seconds", type=float, default=450.0)
    parser.add_argument("--lm-seconds", type=float, default=2000.0)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
