"""The codec of streams that share it, and what steps read on the host, without the engine."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from models.voxcpm2.model import VoxCPM2, load_model
from tests.models.voxcpm2.golden import DIRECTORY
from tests.support.audit import audit
from tests.support.golden import fact_of_own_fixture
from tests.support.speech import SpeechRig

TOLERANCE = {"atol": 2e-4, "rtol": 0.0}


@cache
def voice() -> VoxCPM2:
    """With its own noise."""
    return load_model(DIRECTORY, torch.device("cpu"), torch.float32)


def test_the_codec_remembers_so_many_patches_and_no_more() -> None:
    model = voice()
    patches = torch.randn(12, *model.patch_shape, generator=torch.Generator().manual_seed(1))

    def state_after(last: Tensor) -> Tensor:
        rig = SpeechRig(model)
        for patch in last:
            rig.vae([1], {"patch": patch[None], "emitted": torch.ones(1)})
        return rig.state["vae"][1].clone()

    whole, memory = state_after(patches), model.codec_memory_patches
    torch.testing.assert_close(state_after(patches[-memory:]), whole, **TOLERANCE)
    assert not torch.allclose(state_after(patches[1 - memory :]), whole, **TOLERANCE)


def test_long_clips_are_encoded_in_pieces() -> None:
    vae = voice().vae
    wave = torch.randn(9 * 16000 + 123, generator=torch.Generator().manual_seed(3)) * 0.1
    padded = torch.nn.functional.pad(wave, (0, -wave.shape[0] % 640))
    pieces = list(vae.encode_pieces(wave))
    assert len(pieces) == 3
    torch.testing.assert_close(torch.cat(pieces, dim=-1), vae.encoder(padded[None, None])[0], **TOLERANCE)


@fact_of_own_fixture
@pytest.mark.slow
def test_steps_can_be_captured() -> None:
    rig = SpeechRig(voice())
    rows = {"rows": 3}
    made = {"results": ((3, 4 * 8 + 3), torch.float32)}
    prefill = voice().prefill_step(rig.state, rig.cache.caches, rig.cache.page_size)
    conditioning = {"conditioning": ((3, *voice().state_specs()["conditioning"].shape), torch.float32)}
    for step, bucket, outputs in (
        (voice().decode_step(10, rig.state, rig.cache.caches, rig.cache.page_size), rows, made),
        (voice().tail(10, rig.state), rows, made),
        (prefill, {"tokens": 64, "audio": 0, "sequences": 3}, conditioning),
        (prefill, {"tokens": 64, "audio": 32, "sequences": 3}, conditioning),
        (voice().vae_step(rig.state), rows, {"audio": ((3, 7680), torch.float32)}),
    ):
        audited = audit(step, bucket)
        assert {name: (spec.shape, spec.dtype) for name, spec in audited.items()} == outputs
