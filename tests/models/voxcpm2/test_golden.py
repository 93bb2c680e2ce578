"""VoxCPM2 against the published implementation, tolerances of tests/golden/voxcpm2/README.md."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models.voxcpm2.solver import euler_times, sinusoid, time_span
from tests.models.voxcpm2.golden import CONFIG, INPUTS, MODES, captured, clip, expected, model, utterance
from tests.support.paged import PagedCache
from tests.support.speech import SpeechRig

HIDDEN, AUDIO = 1e-4, 2e-4
BF16, BF16_SOLVE = 0.06, 0.15
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPS = INPUTS["inference_timesteps"]
SOLVES = [(int(match[1]), float(match[2])) for match in captured(r"fp32\.cfm\.patch_n(\d+)_cfg(.+)")]


def close(actual: Tensor, name: str, tolerance: float) -> None:
    reference = expected()[name]
    torch.testing.assert_close(actual.reshape(reference.shape), reference, atol=tolerance, rtol=0)


def component_input(name: str, kind: str) -> Tensor:
    return expected()[f"in.{name}"].to(DTYPES[kind])


def patches_of(latents: Tensor) -> Tensor:
    return latents.transpose(1, 2)


@pytest.fixture(params=["fp32", "bf16"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def tolerance(kind: str) -> float:
    return HIDDEN if kind == "fp32" else BF16


def test_rotary_table_is_the_references(kind: str) -> None:
    network = model(DTYPES[kind]).network
    rows = len(expected()[f"{kind}.rope.cos"])
    table = torch.cat((network.cos, network.cos), dim=-1)[:rows]
    close(table.to(DTYPES[kind]), f"{kind}.rope.cos", 0.0 if kind == "bf16" else 1e-6)


def test_schedule_and_time_embeddings_are_the_references(kind: str) -> None:
    dtype = DTYPES[kind]
    exact = 0.0 if kind == "bf16" else 1e-5
    for span in captured(rf"{kind}\.cfm\.t_span_(\d+)"):
        close(time_span(int(span[1]), dtype), span[0], exact)
    times = torch.stack(euler_times(STEPS, dtype)[0])
    close(times, f"{kind}.cfm.t_values", exact)
    close(sinusoid(times, expected()[f"{kind}.dit.sinusoid"].shape[1]), f"{kind}.dit.sinusoid", exact)
    close(model(dtype).network.feat_decoder.time_embedding(times), f"{kind}.dit.time_embed", tolerance(kind))


def test_language_models_agree_with_the_reference(kind: str) -> None:
    speech = model(DTYPES[kind])
    embeds = component_input("tslm.embeds", kind)[0]
    length = len(embeds)
    network, cache = speech.network, PagedCache(speech.cache_specs(), 2 + length // 4, 4, dtype=DTYPES[kind])
    batch = cache.batch(prefills=[(cache.new_sequence(length), length)])
    close(network.semantic(embeds, network.rotary(torch.arange(length)), batch), f"{kind}.tslm.hidden", tolerance(kind))
    hidden = network.residual(component_input("ralm.embeds", kind)[0], batch)
    close(hidden, f"{kind}.ralm.hidden", tolerance(kind))


@pytest.mark.parametrize(("steps", "cfg"), SOLVES)
def test_a_flow_solve_agrees_with_the_reference(kind: str, steps: int, cfg: float) -> None:
    z = component_input("cfm.z", kind)
    patch = (
        model(DTYPES[kind])
        .solver(steps)
        .solve(
            patches_of(z),
            component_input("cfm.mu", kind).unflatten(1, (2, -1)),
            patches_of(component_input("cfm.cond", kind)),
            torch.full(z.shape[:1], cfg, dtype=z.dtype),
        )
    )
    close(patches_of(patch), f"{kind}.cfm.patch_n{steps}_cfg{cfg:g}", HIDDEN if kind == "fp32" else BF16_SOLVE)


@pytest.mark.parametrize("mode", MODES)
def test_prompt_layout_and_hidden_states_agree_with_the_reference(mode: str) -> None:
    """Prefill at every position, then the generated patches teacher-forced in one further chunk."""
    request, speech = utterance(mode), model()
    layout = request.layout
    assert layout.token_ids.tolist() == expected()[f"{mode}.token_ids"].tolist()
    assert layout.audio_mask.tolist() == expected()[f"{mode}.audio_mask"].bool().tolist()
    mask = torch.from_numpy(layout.audio_mask)
    torch.testing.assert_close(request.patches, expected()[f"{mode}.feat"][mask], atol=HIDDEN, rtol=0)

    network, cache = speech.network, PagedCache(speech.cache_specs())
    length = len(layout.token_ids)
    sequence = cache.new_sequence(length + INPUTS["max_len"])
    lm, residual = network.prompt_backbone(
        torch.from_numpy(layout.token_ids).long(),
        torch.where(mask, mask.cumsum(0) - 1, -1),
        request.patches,
        torch.arange(length),
        cache.batch(prefills=[(sequence, length)]),
    )
    close(lm, f"{mode}.prefill_lm_hidden", HIDDEN)
    close(residual, f"{mode}.prefill_res_hidden", HIDDEN)

    generated = expected()[f"{mode}.patches"][:-1]
    positions = torch.arange(length, length + len(generated))
    batch = cache.batch(prefills=[(sequence, len(generated))])
    embeds = network.embed_encoder_tokens(network.feat_encoder.tokens(generated))
    steps = network.audio_backbone(embeds, network.rotary(positions), batch)
    lm, residual = (torch.cat((first[-1:], rest)) for first, rest in zip((lm, residual), steps, strict=True))
    close(lm, f"{mode}.step_lm_hidden", HIDDEN)
    close(residual, f"{mode}.step_res_hidden", HIDDEN)
    close(network.stop_logits(lm), f"{mode}.stop_logits", HIDDEN)


def test_the_codec_encodes_as_the_reference() -> None:
    latent = list(model().vae.encode_pieces(expected()["vae.encode.wav"][0]))
    close(torch.cat(latent, dim=-1), "vae.encode.latent", HIDDEN)
    for side, kind in (("right", "reference"), ("left", "prompt")):
        file = next(mode[f"{kind}_wav"] for mode in INPUTS["modes"].values() if f"{kind}_wav" in mode)
        close(torch.cat(list(model().encode_reference_pieces(clip(file), side))), f"vae.{kind}_patches", HIDDEN)


def test_the_codec_decodes_at_once_as_the_reference() -> None:
    close(model().vae.decoder(expected()["vae.decode.z"]), "vae.decode.audio", AUDIO)


def test_the_codec_streams_what_it_decodes_at_once() -> None:
    rig, latents = SpeechRig(model()), expected()["vae.decode.z"][0].T.unflatten(0, (-1, CONFIG["patch_size"]))
    chunks = []
    for latent in latents:
        chunks.append(rig.vae([4], {"patch": latent[None], "emitted": torch.ones(1, dtype=torch.bool)}, rows=3))
    close(torch.stack(chunks), "vae.decode.stream", AUDIO)
    close(torch.cat(chunks, dim=1), "vae.decode.audio", AUDIO)


def test_unprimed_continuation_is_the_references_cold_start() -> None:
    ((name, mode),) = [(match[0], match[1]) for match in captured(r"(\w+)\.audio_stream_first\d+")]
    rig = SpeechRig(model())
    request = utterance(mode)
    rig.admit(1, request)
    rig.state["vae"][1] = 0.0
    slots, conditioning = rig.prefill({1: -1})
    chunks = []
    for step in range(len(expected()[name])):
        out = rig.decode(slots) if step else rig.tail(slots, conditioning)
        chunks.append(rig.vae(slots, out))
    close(torch.stack(chunks), name, AUDIO)


def test_rate_and_sizes_of_a_patch_follow_from_the_configuration() -> None:
    speech, codec = model(), CONFIG["audio_vae_config"]
    frames = CONFIG["patch_size"]
    assert speech.sample_rate == codec["out_sample_rate"]
    assert speech.samples_per_patch == frames * math.prod(codec["decoder_rates"])
    assert math.prod(speech.patch_shape) == frames * CONFIG["feat_dim"]
