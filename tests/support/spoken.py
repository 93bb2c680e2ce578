"""Utterances of the voice's training, of noise."""

from __future__ import annotations

import numpy as np

from training.voice.corpus import Spoken
from training.voice.latents import FRAMES, LATENT_DIM, PATCH


def utterance(number: int) -> Spoken:
    """Of 4 to 11 patches."""
    drawn, patches = np.random.default_rng(number), 4 + number % 8
    text = "a fox and a dog meet at the old mill today"[: 4 * patches]
    begins = np.linspace(0, len(text) - 2, patches).astype(np.int16)
    return Spoken(
        text,
        text,
        drawn.integers(-3000, 3000, patches * PATCH).astype(np.int16),
        drawn.normal(0.0, 0.5, (patches * FRAMES, LATENT_DIM)).astype(np.float16),
        drawn.integers(0, 40, patches * FRAMES).astype(np.uint8),
        np.zeros(2 * patches * FRAMES, np.uint8),
        np.stack((begins, begins + 2), axis=1),
    )
