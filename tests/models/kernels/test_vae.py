"""The kernels of VoxCPM2's codec against their references, in one piece and as streams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from models.layers.precision import Precision
from models.voxcpm2 import audio_vae, vae_layers
from models.voxcpm2.audio_vae import AudioVAE, CodecDecoder
from models.voxcpm2.config import AudioVAEConfig
from models.voxcpm2.kernels.vae import UnitTile
from models.voxcpm2.vae_layers import Streams, residual_unit, snake_samples, snake_upsample
from models.voxcpm2.vae_weights import randomise_audio_vae, round_product_weights
from tests.models.kernels.checking import poisoned_allocations, relative_error, wide_in_place
from tests.support.slow import slow

SMALL = AudioVAEConfig(
    encoder_dim=8,
    encoder_rates=(2,),
    latent_dim=64,
    decoder_dim=128,
    decoder_rates=(5, 2),
    sr_bin_boundaries=(20000, 30000, 40000),
    sample_rate=16000,
    out_sample_rate=48000,
)
FRAMES_A_STEP = 4
LOUDNESS = 0.1
"""Root mean square of the output to which the last convolution is scaled: as loud as speech, where tanh is nearly
linear."""
LIMITS: dict[Precision, float] = {"ieee": 1e-6, "tf32": 1e-3, "float16": 1e-3}
"""Of the error relative to the whole result. Operands of 10 mantissa bits (TF32, float16) are off by 2^-11 = 5e-4 at
most each, in random directions."""


def positive(*shape: int, device: torch.device) -> Tensor:
    return torch.rand(*shape, device=device) * 3 + 0.2


def unit_inputs(rows: int, width: int, length: int, device: torch.device) -> tuple[Tensor, ...]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    return (
        random(rows, width, length),
        positive(width, device=device),
        random(width, 1, 7),
        random(width),
        positive(width, device=device),
        random(width, width, 1) * width**-0.5,
        random(width),
    )


def operand(weight: Tensor, precision: str) -> Tensor:
    return weight.half() if precision == "float16" else weight


def memory_of(table: Tensor, width: int, pad: int) -> Tensor:
    return table[:, 10 : 10 + width * pad].unflatten(1, (width, pad))


def check(op: Any, arguments: Sequence[Any], pad: int, limit: float, narrow: int | None = None, **how: Any) -> None:
    """In one piece, and with a stream's memory of `pad` values. narrow: the argument that products read in less than
    32 bits."""
    device, (rows, width, _) = arguments[0].device, arguments[0].shape
    table = torch.randn(rows + 3, 20 + width * pad, device=device)
    slots = torch.randperm(rows + 3, device=device)[:rows]
    given = list(arguments)
    if narrow is not None:
        given[narrow] = operand(given[narrow], how["precision"])
    wide_table = table.double()
    expected = op.reference(*wide_in_place(*arguments), (memory_of(wide_table, width, pad), slots))
    with poisoned_allocations():
        out = op.kernel(*given, (memory_of(table, width, pad), slots), **how)
        fresh = op.kernel(*given, **how)
    assert relative_error(out, expected) < limit
    assert relative_error(table, wide_table) < 1e-6
    assert relative_error(fresh, op.reference(*wide_in_place(*arguments))) < limit


def check_unit(rows, width, length, dilation, device, precision, tile=None) -> None:
    inputs = unit_inputs(rows, width, length, device)
    how = {"precision": precision, "unit_tile": tile}
    check(residual_unit, (*inputs[:4], dilation, *inputs[4:]), 6 * dilation, LIMITS[precision], narrow=6, **how)


def check_upsample(rows, width, length, stride, device, precision) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    x, scale, shift, alpha = random(rows, width, length), random(width), random(width), positive(width, device=device)
    weight, bias = random(width, width // 2, 2 * stride) * width**-0.5, random(width // 2)
    arguments = (x, scale, shift, alpha, weight, bias, stride)
    check(snake_upsample, arguments, 1, LIMITS[precision], narrow=4, precision=precision)


def check_samples(rows, width, length, device) -> None:
    x, alpha = torch.randn(rows, width, length, device=device), positive(width, device=device)
    weight, bias = torch.randn(1, width, 7, device=device) * (7 * width) ** -0.5, torch.randn(1, device=device)
    check(snake_samples, (x, alpha, weight, bias), 6, 1e-6)


def test_tf32_products_keep_the_strength_of_a_signal(device) -> None:
    """Cut off instead of rounded, operands would take 3e-4 each."""
    x, scale, weight = (torch.rand(shape, device=device) for shape in ((3, 64, 24), (64,), (64, 32, 4)))
    weight = ((weight.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    arguments = (x, scale, scale, scale + 0.5, weight, scale[:32], 2)
    out = snake_upsample.kernel(*arguments, precision="tf32").double()
    expected = snake_upsample.reference(*wide_in_place(*arguments))
    assert abs(float((out * expected).sum() / expected.square().sum()) - 1) < 2e-5


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize(
    ("width", "length", "dilation"),
    [slow(32, 40, 1), (32, 20, 9), *(slow(*size) for size in [(64, 24, 3), (96, 70, 9), (128, 8, 1), (256, 5, 3)])],
)
def test_residual_unit_tiny(device, width, length, dilation, precision) -> None:
    check_unit(2, width, length, dilation, device, precision)


@pytest.mark.parametrize("dilation", [slow(1), slow(3), 9])
@pytest.mark.parametrize("length", [slow(1), slow(10), 150])
@pytest.mark.parametrize(
    "tile", [slow(UnitTile(16, 32, 1, 4, True)), UnitTile(32, 32, 4, 4, False), slow(UnitTile(64, 32, 2, 4, True))]
)
def test_walks_of_a_residual_unit(device, dilation, length, tile) -> None:
    check_unit(2, 32, length, dilation, device, "float16", tile)


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize(("width", "length", "stride"), [slow(64, 4, 8), (32, 12, 5), slow(64, 24, 2), slow(96, 3, 6)])
def test_upsample_tiny(device, width, length, stride, precision) -> None:
    check_upsample(3, width, length, stride, device, precision)


@pytest.mark.parametrize(("width", "length"), [slow(32, 1), (32, 5), slow(64, 70), slow(96, 64)])
def test_samples_tiny(device, width, length) -> None:
    check_samples(3, width, length, device)


def test_float16_saturates(device) -> None:
    """Beyond float16's range an operand is its largest value: wrong but finite, and the memory keeps the true one."""
    x = torch.full((1, 32, 4), 1e6, device=device)
    alpha, eye = torch.ones(32, device=device), torch.eye(32, device=device, dtype=torch.float16)[:, :, None]
    depthwise, bias = torch.ones(32, 1, 7, device=device), torch.zeros(32, device=device)
    memory, slots = torch.zeros(1, 32, 6, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    for sign in (1, -1):
        rest = (depthwise, bias, 1, alpha, eye, bias, (memory, slots))
        out = residual_unit.kernel(sign * x, alpha, *rest, precision="float16")
        torch.testing.assert_close(out, sign * (x + 65504.0))
        assert memory[0, 0, -1].item() == pytest.approx(sign * 1e6, rel=1e-5)
        memory.zero_()
    weight = torch.ones(32, 1, 4, device=device, dtype=torch.float16)
    out = snake_upsample.kernel(x, alpha, bias, alpha, weight, bias[:1], 2, precision="float16")
    torch.testing.assert_close(out[0, 0, -1], torch.tensor(64 * 65504.0, device=device))


def random_codec(config: AudioVAEConfig, seed: int) -> AudioVAE:
    """Random weights that keep a signal's scale through the decoder, and give an output as loud as LOUDNESS."""
    vae = AudioVAE(config).requires_grad_(False)
    randomise_audio_vae(vae, seed)
    last = vae.decoder.last
    quiet = vae.decoder(latents(config, 1, FRAMES_A_STEP, seed))
    last.weight.mul_(LOUDNESS / float(quiet.std()))
    last.bias.zero_()
    return vae


def latents(config: AudioVAEConfig, rows: int, frames: int, seed: int) -> Tensor:
    return torch.randn(rows, config.latent_dim, frames, generator=torch.Generator().manual_seed(seed))


def streamed(decoder: CodecDecoder, z: Tensor) -> Tensor:
    """Samples [rows, T * hop] of z [rows, latent_dim, T], FRAMES_A_STEP at a time, as they are served."""
    rows = z.shape[0]
    memory = torch.zeros(rows, decoder.memory_size, dtype=z.dtype, device=z.device)
    streams = Streams(memory, torch.arange(rows, device=z.device))
    return torch.cat([decoder(part, streams)[:, 0] for part in z.split(FRAMES_A_STEP, dim=-1)], dim=-1)


def decibels(audio: Tensor, reference: Tensor) -> float:
    """Signal-to-noise ratio; infinite for equal signals."""
    audio, reference = audio.double().cpu(), reference.double().cpu()
    noise = float((audio - reference).norm())
    return 20 * math.log10(float(reference.norm()) / noise) if noise else math.inf


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> CodecDecoder:
    """A small one whose modules go to the kernels wherever they run; made before that, on the CPU, as it is loaded."""
    codec = random_codec(SMALL, seed=0)
    round_product_weights(codec)

    def unit(*given: Any) -> Tensor:
        *arguments, precision = given
        arguments[6] = operand(arguments[6], precision)
        return residual_unit.kernel(*arguments, precision=precision)

    def upsample(*given: Any) -> Tensor:
        *arguments, precision = given
        arguments[4] = operand(arguments[4], precision)
        return snake_upsample.kernel(*arguments, precision=precision)

    monkeypatch.setattr(vae_layers, "residual_unit", unit)
    monkeypatch.setattr(vae_layers, "snake_upsample", upsample)
    monkeypatch.setattr(audio_vae, "snake_samples", snake_samples.kernel)
    return codec.decoder


@pytest.mark.parametrize(("precision", "least_db"), [("ieee", 100.0), slow("tf32", 55.0), slow("float16", 55.0)])
def test_a_streamed_decoder_equals_the_reference_in_one_pass(decoder, device, precision, least_db, monkeypatch) -> None:
    """Every layer's layout is the next one's. Operands of 10 mantissa bits: 2^-11 each, 66 dB, in a dozen products."""
    # One of the convolutions is cuDNN's.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision != "ieee")
    z = latents(SMALL, 2, 8, seed=1)
    decoder = decoder.to(device)
    decoder.set_precision(precision)
    with torch.inference_mode(), poisoned_allocations():
        audio = streamed(decoder, z.to(device))
    monkeypatch.undo()
    decoder = decoder.double().cpu()
    decoder.set_precision(None)
    with torch.inference_mode():
        expected = decoder(z.double())[:, 0]
    assert decibels(audio, expected) > least_db


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "float16"])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("dilation", [1, 3, 9])
@pytest.mark.parametrize(("width", "length"), [(1024, 32), (512, 192), (256, 960), (128, 1920), (64, 3840), (32, 7680)])
def test_residual_unit(rows, width, length, dilation, precision) -> None:
    check_unit(rows, width, length, dilation, torch.device("cuda"), precision)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "float16"])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(
    ("width", "length", "stride"),
    [(2048, 4, 8), (1024, 32, 6), (512, 192, 5), (256, 960, 2), (128, 1920, 2), (64, 3840, 2)],
)
def test_upsample(rows, width, length, stride, precision) -> None:
    check_upsample(rows, width, length, stride, torch.device("cuda"), precision)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16])
def test_samples(rows) -> None:
    check_samples(rows, 32, 7680, torch.device("cuda"))
