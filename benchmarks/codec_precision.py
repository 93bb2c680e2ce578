"""How much of the signal each precision of the codec's GEMMs preserves: published size with random weights, on a GPU.

python -m benchmarks.codec_precision

Signal-to-noise ratios in dB of streamed audio against the plain modules in float64.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure.record import table, write
from benchmarks.steps.codec import PUBLISHED, decibels, latents, random_codec, streamed
from models.layers.precision import Precision
from models.voxcpm2.audio_vae import AudioVAE
from models.voxcpm2.vae_weights import round_product_weights

MEASURED: tuple[Precision, ...] = ("tf32", "float16")
STREAMS = 8
FRAMES = 24
"""Latent frames of a stream, 40 ms each."""


def of_precision(vae: AudioVAE, precision: Precision, z: Tensor) -> Tensor:
    """Audio of a copy of the codec on a GPU, with weights treated as when a checkpoint is loaded."""
    vae = copy.deepcopy(vae).cuda()
    round_product_weights(vae)
    vae.decoder.set_precision(precision)
    return streamed(vae.decoder, z.cuda())


@torch.inference_mode()
def main() -> None:
    rows: list[dict[str, Any]] = []
    for seed in range(3):
        vae = random_codec(PUBLISHED, seed)
        z = latents(PUBLISHED, STREAMS, FRAMES, seed)
        exact = streamed(copy.deepcopy(vae).cuda().decoder.double(), z.cuda().double())
        for precision in MEASURED:
            found = of_precision(vae, precision, z).double()
            row = {
                "precision": precision,
                "seed": seed,
                "snr_db": decibels(found, exact),
                "strength": float((found * exact).sum() / exact.square().sum()),
                "rms": float(found.square().mean().sqrt()),
                "peak": float(found.abs().max()),
            }
            rows.append(row)
            print(table([row]), flush=True)
    write("codec_precision", rows, streams=STREAMS, frames=FRAMES)
    print(table(rows))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
