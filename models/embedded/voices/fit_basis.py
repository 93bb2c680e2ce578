"""The directions of the latents, from some minutes of the voice's speech.

python -m models.embedded.voices.fit_basis [FILE] [--library DIR]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from models.embedded.voices import corpus, flite
from models.embedded.voices.flite import Flite
from models.embedded.voices.latents import HOP, Spectrum, fit, pitch_track
from models.embedded.voices.sentences import Writer
from models.embedded.voices.words import dictionary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=Path(corpus.__file__).parent / "basis.npz")
    parser.add_argument("--library", type=Path, help="directory of libflite's files; default: where the linker looks")
    parser.add_argument("--words", type=Path, default=Path("/usr/share/dict/american-english-small"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--texts", type=int, default=600)
    options = parser.parse_args()
    speaker, writer = Flite("slt", options.library), Writer(options.seed, dictionary(options.words))
    spectrum, mels, tracks = Spectrum(torch.device("cpu")), [], []
    for _ in range(options.texts):
        said = speaker.speak(writer.text())
        wave = np.pad(said.samples, (0, -len(said.samples) % HOP))
        track = torch.from_numpy(pitch_track(said.pitch, flite.PITCH_SECONDS, 0.0, len(wave) // HOP))
        mels.append(spectrum(torch.from_numpy(wave).float() / 32768.0, track[:, 0].exp()))
        tracks.append(track)
    fit(torch.cat(mels), torch.cat(tracks)).save(options.file)


if __name__ == "__main__":
    main()
