"""The networks as they are trained compute what the server computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from models.embedded.voices.codec import Codec, published, shifted
from models.embedded.voices.config import CONFIG, tokens
from models.embedded.voices.export import tokenizer, write
from models.embedded.voices.losses import causal_mask
from models.embedded.voices.network import Network, solver_times
from models.embedded.voices.sampler import Prompt, Sampler
from models.embedded.voices.served import Served
from models.errors import InputError
from models.voxcpm2.config import SOLVER_STEPS
from models.voxcpm2.model import VoxCPM2, load_model
from models.voxcpm2.processor import VoxCPM2Processor, load_processor
from models.voxcpm2.solver import schedule
from tests.support.speech import SpeechRig, Utterance

TEXT = "Hello, the red fox costs 42 dollars!"


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """Norms and biases off their first values, so that mistakes show."""
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        if parameter.dim() < 2 or 1 in parameter.shape:
            parameter.data.mul_(0.8 + 0.4 * torch.rand(parameter.shape, generator=generator))
            parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        parameter.data.copy_(parameter.data.bfloat16().float())
    return module.requires_grad_(False)


@pytest.fixture(scope="module")
def trained() -> tuple[Network, Codec]:
    torch.manual_seed(0)
    network, codec = Network(CONFIG), Codec(CONFIG["audio_vae_config"])
    randomised(network)
    randomised(codec)
    codec.load_state_dict(
        {name: v if v.dtype == torch.int32 else v.half().float() for name, v in codec.state_dict().items()}
    )
    return network, codec


@pytest.fixture(scope="module")
def directory(trained: tuple[Network, Codec], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    network, codec = trained
    path = tmp_path_factory.mktemp("voice")
    weights = {name: value.bfloat16() for name, value in network.state_dict().items()}
    write(path, weights, published(codec), CONFIG, tokenizer())
    return path


@pytest.fixture(scope="module")
def served(directory: Path) -> VoxCPM2:
    return load_model(directory, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def processor(directory: Path) -> VoxCPM2Processor:
    return load_processor(directory)


def test_hidden_vectors_of_all_layouts(
    trained: tuple[Network, Codec], served: VoxCPM2, processor: VoxCPM2Processor
) -> None:
    network, _ = trained
    for reference, prompt in ((0, 0), (5, 0), (0, 4), (5, 4)):
        layout = processor.layout(processor.tokenize(TEXT), reference_patches=reference, prompt_patches=prompt)
        patches = torch.randn(reference + prompt, *served.patch_shape)
        rig = SpeechRig(served)
        rig.admit(1, Utterance(layout, patches, seed=1, prompt_patches=prompt))
        _, conditioning = rig.prefill({1: -1})
        audio = torch.from_numpy(layout.audio_mask)[None]
        embeds = torch.zeros(1, audio.shape[1], CONFIG["lm_config"]["hidden_size"])
        if len(patches):
            embeds[audio] = network.embed_patches(patches)
        ids = torch.from_numpy(layout.token_ids.astype(np.int64))[None]
        places = torch.arange(ids.shape[1])[None]
        hidden, residual, _ = network.backbone(ids, audio, embeds, places, causal_mask(torch.zeros_like(places)))
        made = torch.cat((hidden[0, -1], residual[0, -1]))
        torch.testing.assert_close(made, conditioning[0], atol=1e-4, rtol=1e-4)


def test_velocity_and_stop(trained: tuple[Network, Codec], served: VoxCPM2) -> None:
    network, _ = trained
    frames, channels = served.patch_shape
    lm, residual, x, before = torch.randn(2, 3, 256).unbind() + torch.randn(2, 3, frames, channels).unbind()
    mu = network.condition(lm, residual)
    torch.testing.assert_close(mu, torch.stack(served.network.condition(lm, residual), dim=1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(network.stop_logits(lm), served.network.stop_logits(lm), atol=1e-4, rtol=1e-4)
    times = solver_times(CONFIG["dit_config"]["hidden_dim"], torch.device("cpu"))
    table = network.feat_decoder.estimator.time_embedding(times.waves, times.still)
    solver = served.solver(SOLVER_STEPS[0])
    torch.testing.assert_close(table[: len(solver.time_table)], solver.time_table, atol=1e-4, rtol=1e-4)
    dit = served.network.feat_decoder
    time = solver.time_table[4].expand(3, 1, -1)
    expected = dit.velocity(torch.cat((mu, time, dit.cond_proj(before), dit.in_proj(x)), dim=1))
    made = network.velocity(x, mu, table[4].expand(3, -1), before)
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)


def test_the_solver_ends_at_the_data_that_the_training_aims_at() -> None:
    """With the velocity that is trained, every solver goes from noise to the data, though its first step stands."""
    data, noise = torch.randn(2, 4, 8).unbind()
    times = solver_times(192, torch.device("cpu"))
    begin = 0
    for steps in SOLVER_STEPS:
        plan = schedule(steps, torch.float32)
        x = noise
        for index, width in enumerate(plan.step_sizes):
            part, time = times.noise[begin + index], times.time[begin + index]
            torch.testing.assert_close(x, data + part * (noise - data), atol=1e-4, rtol=1e-4)
            x = x - width * (x - data) / time
        torch.testing.assert_close(x, data, atol=1e-4, rtol=1e-4)
        begin += 2 * len(plan.times)


def test_codec(trained: tuple[Network, Codec], served: VoxCPM2) -> None:
    _, codec = trained
    wave, latents = 0.1 * torch.randn(1, 1, 6400), torch.randn(1, served.patch_shape[1], 9)
    torch.testing.assert_close(codec.encoder(wave), served.vae.encoder(wave), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(codec.decoder(latents), served.vae.decoder(latents), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (TEXT, "hello, the red fox costs 42 dollars!"),
        ("  Café —\n two  (2)", "cafe , two (2)"),
        ("50% of x & y", "50 percent of x and y"),
        ("don’t 你好 \U0001f600 go", "don't go"),
    ],
)
def test_tokenizer_and_training_agree(processor: VoxCPM2Processor, text: str, meant: str) -> None:
    assert processor.tokenize(text) == tokens(meant)


def test_the_sampler_speaks_as_the_server(
    trained: tuple[Network, Codec], served: VoxCPM2, processor: VoxCPM2Processor
) -> None:
    """Prompts of different length together, in all four modes; patches and ends."""
    network, _ = trained
    prompts, utterances = [], {}
    for slot, (text, reference, prompt) in enumerate((("Hi.", 0, 0), (TEXT, 3, 0), ("No!", 0, 4), ("Well?", 2, 3)), 1):
        layout = processor.layout(processor.tokenize(text), reference_patches=reference, prompt_patches=prompt)
        patches = torch.randn(reference + prompt, *served.patch_shape)
        utterances[slot] = Utterance(layout, patches, seed=70 + slot, max_patches=3 + slot, prompt_patches=prompt)
        ids, mask = torch.from_numpy(layout.token_ids.astype(np.int64)), torch.from_numpy(layout.audio_mask)
        prompts.append(Prompt(ids, mask, patches, 70 + slot, 3 + slot, continued=prompt > 0))
    expected, _ = SpeechRig(served).speak(utterances)
    for slot, (patches, _) in enumerate(Sampler(network).speak(prompts), 1):
        torch.testing.assert_close(patches, expected[slot], atol=2e-3, rtol=1e-3)


def test_depthwise_convolution_as_shifted_products() -> None:
    x, weight, bias = torch.randn(2, 6, 60), torch.randn(6, 1, 7), torch.randn(6)
    for dilation in (1, 3, 9):
        expected = torch.nn.functional.conv1d(x, weight, bias, dilation=dilation, groups=6)
        torch.testing.assert_close(shifted(x, weight, bias, dilation), expected)


def test_the_servers_model_in_one_batch(directory: Path, processor: VoxCPM2Processor) -> None:
    """The gates' way through the server's model: like an engine that steps the same requests."""
    served = Served(directory)
    prompts, utterances = [], {}
    for slot, (text, prompt) in enumerate((("Hi.", 0), (TEXT, 3)), 1):
        layout = processor.layout(processor.tokenize(text), prompt_patches=prompt)
        patches = torch.randn(prompt, *served.model.patch_shape)
        utterances[slot] = Utterance(layout, patches, seed=slot, max_patches=2 + slot, prompt_patches=prompt)
        ids, mask = torch.from_numpy(layout.token_ids.astype(np.int64)), torch.from_numpy(layout.audio_mask)
        prompts.append(Prompt(ids, mask, patches, slot, 2 + slot, continued=prompt > 0))
    patches_by_slot, audio = SpeechRig(served.model).speak(utterances)
    for slot, speech in enumerate(served.speak(prompts), 1):
        torch.testing.assert_close(speech.patches, patches_by_slot[slot], atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(speech.samples, audio[slot], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("text", ["你好", "\U0001f600", "~^~"])
def test_refuses_a_text_without_a_character_that_it_knows(processor: VoxCPM2Processor, text: str) -> None:
    with pytest.raises(InputError, match="no character"):
        processor.tokenize(text)
