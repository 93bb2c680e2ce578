"""Prefills, slots and the codec of streams that share them, without the engine."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.interfaces.processor import SpeechLayout
from models.voxcpm2.model import VoxCPM2, load_model
from models.voxcpm2.network import ScalarQuantizer
from tests.models.voxcpm2.golden import DIRECTORY, MODES, PATCH_SHAPE, utterance
from tests.support.audit import audit
from tests.support.golden import fact_of_own_fixture
from tests.support.speech import SpeechRig, Utterance

TOLERANCE = {"atol": 2e-4, "rtol": 0.0}


@cache
def voice(device: str = "cpu") -> VoxCPM2:
    """With its own noise."""
    return load_model(DIRECTORY, torch.device(device), torch.float32)


def request(number: int) -> Utterance:
    """Every stream has its own prompt, noise, guidance and length."""
    made = utterance(MODES[number % 4], max_patches=2 + number % 4, min_patches=9)
    made.seed, made.cfg, made.temperature = 1000 + number, 1.5 + 0.25 * (number % 5), 1.0 - 0.05 * (number % 8)
    return made


PROMPTS = st.lists(st.tuples(st.integers(1, 16), st.integers(0, 8), st.booleans()), min_size=1, max_size=16)
EDGES = st.sampled_from([None, -1, 0, 1])
CUTS = st.integers(0, 20)
PREFILL_BUCKETS = [
    {"tokens": tokens, "audio": audio, "sequences": 16}
    for tokens in (32, 64, 96, 192, 288, 386)
    for audio in (0, tokens // 4, tokens)
]


@cache
def prefill_rigs(device: str) -> tuple[SpeechRig, SpeechRig]:
    """One that runs prefills eagerly and one that replays them."""
    eager, replaying = (
        SpeechRig(voice(device), num_slots=18, num_pages=200, prefills=buckets, device=device)
        for buckets in ((), PREFILL_BUCKETS)
    )
    return eager, replaying


def prompt(number: int, text: int, clip: int, *, continued: bool) -> Utterance:
    """`text` tokens and a clip of `clip` patches before or behind them."""
    rng = np.random.default_rng(number)
    ids, mask = rng.integers(3, 90, text + clip), np.zeros(text + clip, dtype=np.bool_)
    mask[text if continued else 0 :][:clip] = True
    patches = torch.from_numpy(rng.standard_normal((clip, *PATCH_SHAPE)).astype(np.float32))
    return Utterance(SpeechLayout(ids, mask), patches, seed=number, prompt_patches=clip if continued else 0)


CODE_EDGE = 2e-5
"""Of a code's width: kernels that sum in another order differ by less."""


class QuantizerEdges:
    """Hook on the scalar quantizer that notes how near a value came to the edge between two codes. Beyond it either
    code is right, and all that follows differs."""

    def __init__(self) -> None:
        self.nearest = 0.5

    def __call__(self, quantizer: ScalarQuantizer, inputs: tuple[Tensor]) -> None:
        if inputs[0].is_cuda and torch.cuda.is_current_stream_capturing():  # which a value read would end
            return
        codes = quantizer.in_proj(inputs[0]).tanh() * quantizer.scale
        self.nearest = min(self.nearest, float((codes - codes.floor() - 0.5).abs().min()))


def compare_prefills(prompts: list[tuple[int, int, bool]], edge: int | None, cut: int, device: str = "cpu") -> None:
    """Any mix of prompts; with `edge`, the last one grows to the next bucket or a token around it. The first `cut`
    positions of each are in the cache already, of shorter ones none."""
    if edge is not None:
        tokens = sum(text + clip for text, clip, _ in prompts)
        bucket = next(bucket["tokens"] for bucket in PREFILL_BUCKETS if bucket["tokens"] > tokens)
        text, clip, continued = prompts[-1]
        prompts = [*prompts[:-1], (text + min(bucket + edge, PREFILL_BUCKETS[-1]["tokens"]) - tokens, clip, continued)]
    results = []
    edges = QuantizerEdges()
    for rig in prefill_rigs(device):
        rig.clear()
        for slot, (text, clip, continued) in enumerate(prompts, start=1):
            rig.admit(slot, prompt(slot, text, clip, continued=continued))
        with rig.model.network.fsq_layer.register_forward_pre_hook(edges):  # a replay on a GPU runs no hooks
            if begun := {slot: cut for slot, (text, clip, _) in enumerate(prompts, start=1) if 0 < cut < text + clip}:
                assert rig.prefill(begun)[0] == []
            slots, conditioning = rig.prefill(dict.fromkeys(range(1, len(prompts) + 1), -1))
            # The next step reads the keys that the prefill wrote.
            results.append((conditioning, rig.tail(slots, conditioning)["patch"], rig.decode(slots)["patch"]))
    assume(edges.nearest > CODE_EDGE)
    for one, other in zip(*results, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, **TOLERANCE)


@settings(max_examples=3, deadline=None)
@given(prompts=PROMPTS, edge=EDGES, cut=CUTS)
@example(prompts=[(1, 0, False)] * 16, edge=None, cut=0)
@example(prompts=[(0, 32, True)], edge=None, cut=16)
@example(prompts=[(12, 20, False), (3, 1, True), (8, 17, False)], edge=None, cut=16)
def test_replayed_prefill_equals_eager(prompts: list[tuple[int, int, bool]], edge: int | None, cut: int) -> None:
    compare_prefills(prompts, edge, cut)


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
