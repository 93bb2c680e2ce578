"""The networks as they are trained compute what the server computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models.voxcpm2.config import SOLVER_STEPS
from models.voxcpm2.model import VoxCPM2, load_model
from models.voxcpm2.processor import VoxCPM2Processor, load_processor
from models.voxcpm2.solver import schedule
from tests.support.speech import SpeechRig, Utterance
from training.voice.config import CONFIG, PUBLISHED
from training.voice.make import export
from training.voice.network import Network, causal_mask, solver_times
from training.voice.served import Prompt, Served

pytestmark = pytest.mark.slow

TEXT = "Hello, the red fox costs 42 dollars!"


@pytest.fixture(scope="module")
def network() -> Network:
    """Norms and biases off their first values, so that mistakes show."""
    torch.manual_seed(0)
    network, generator = Network(), torch.Generator().manual_seed(3)
    for parameter in network.parameters():
        if parameter.dim() < 2 or 1 in parameter.shape:
            parameter.data.mul_(0.8 + 0.4 * torch.rand(parameter.shape, generator=generator))
            parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        parameter.data.copy_(parameter.data.bfloat16().float())
    return network.requires_grad_(False)


@pytest.fixture(scope="module")
def directory(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make voice` exports it, beside the published codec."""
    path = tmp_path_factory.mktemp("voice")
    torch.save({"model": network.state_dict()}, path / "lm.pt")
    export(path / "lm.pt", path / "checkpoint")
    names = {file.name for file in PUBLISHED.iterdir()} - {"built_in_voices.npz"}
    assert {file.name for file in (path / "checkpoint").iterdir()} == names
    return path / "checkpoint"


@pytest.fixture(scope="module")
def served(directory: Path) -> VoxCPM2:
    return load_model(directory, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def processor(directory: Path) -> VoxCPM2Processor:
    return load_processor(directory)


def test_hidden_vectors_of_all_layouts(network: Network, served: VoxCPM2, processor: VoxCPM2Processor) -> None:
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


def test_velocity_and_stop(network: Network, served: VoxCPM2) -> None:
    frames, channels = served.patch_shape
    lm, residual, x, before = torch.randn(2, 3, 256).unbind() + torch.randn(2, 3, frames, channels).unbind()
    mu = network.condition(lm, residual)
    torch.testing.assert_close(mu, torch.stack(served.network.condition(lm, residual), dim=1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(network.stop_logits(lm), served.network.stop_logits(lm), atol=1e-4, rtol=1e-4)
    times = solver_times(CONFIG["dit_config"]["hidden_dim"])
    table = network.time_embedding(times.waves, times.still)
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
    times = solver_times(192)
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


def test_the_servers_model_in_one_batch(directory: Path, processor: VoxCPM2Processor) -> None:
    """The gates' way through the server's model: like an engine that steps the same requests, in all four modes."""
    served = Served(directory)
    prompts, utterances = [], {}
    for slot, (text, reference, prompt) in enumerate((("Hi.", 0, 0), (TEXT, 3, 0), ("No!", 0, 4)), 1):
        layout = processor.layout(processor.tokenize(text), reference_patches=reference, prompt_patches=prompt)
        patches = torch.randn(reference + prompt, *served.model.patch_shape)
        utterances[slot] = Utterance(layout, patches, seed=slot, max_patches=2 + slot, prompt_patches=prompt)
        prompts.append(Prompt(text, patches, slot, 2 + slot, continued=prompt > 0))
    patches_by_slot, audio = SpeechRig(served.model).speak(utterances)
    for slot, speech in enumerate(served.speak(prompts), 1):
        torch.testing.assert_close(speech.patches, patches_by_slot[slot], atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(speech.samples, audio[slot], atol=2e-3, rtol=1e-3)
