"""The recogniser's training sees the prompts, features and logits of the product."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from models.qwen3_asr.model import load_model
from models.qwen3_asr.processor import load_processor
from service.hub import EMBEDDED
from tests.support.chat_golden import encode, generate, largest_difference
from training.hearing.batches import SECONDS, Batches, Store, phones, together
from training.hearing.gates import WANTED
from training.hearing.network import PUBLISHED, Features, Network, text_of
from training.hearing.sounds import SAMPLE_RATE, SOUND
from training.hearing.sounds import write as write_sounds
from training.hearing.train import Trainer
from training.loop import hashes, publish
from training.voice.corpus import Reader

CPU = torch.device("cpu")
TEXTS = ("The small cat sat.", "It costs 12 dollars.", "Anna, who?")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three utterances of phones 1, 2 and 3 that are tones, and noise."""
    random, lengths = np.random.default_rng(0), (40, 70, 55)
    tones = [8000 * np.sin(np.arange(SOUND * n) * 0.05 * k) for k, n in enumerate(lengths, 1)]
    said = [
        (text, tone.astype(np.int16), np.full(len(tone) // SOUND, k, np.uint8))
        for k, (text, tone) in enumerate(zip(TEXTS, tones, strict=True), 1)
    ]
    write_sounds(tmp_path / "voices-0.npz", said)
    hiss = (1000 * random.standard_normal(60 * SAMPLE_RATE)).astype(np.int16)
    write_sounds(tmp_path / "noise-0.npz", [("", hiss, np.full(len(hiss) // SOUND, 255, np.uint8))])
    return tmp_path


@pytest.fixture
def store(data: Path) -> Store:
    store = Store(0.1, CPU)
    store.take_in(Reader(data), 2)
    return store


def batches(store: Store) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """One of each length."""
    source, seen = Batches(store, 24, 3), set[int]()
    while len(seen) < len(SECONDS):
        batch = source.batch()
        if (seconds := int(batch.pop("seconds"))) not in seen:
            seen.add(seconds)
            yield seconds, batch


def test_the_embedded_checkpoint_is_the_one_that_passed() -> None:
    embedded, weights = EMBEDDED / "qwen3_asr", "model.safetensors"
    gates = json.loads((EMBEDDED / "gates_qwen3_asr.json").read_text(encoding="utf-8"))
    assert gates["sha256"][weights] == hashes(embedded / weights)[weights]
    assert gates["passed"] and all(gates[name] <= most for name, most in WANTED.items())


def test_logits_are_those_of_the_product(store: Store, tmp_path: Path) -> None:
    torch.manual_seed(3)
    network = Network()
    for parameter in network.parameters():
        # Norms of one and biases of zero would hide mistakes in them.
        parameter.data += 0.05 * torch.randn_like(parameter)
    network.load_state_dict({name: value.bfloat16().float() for name, value in network.state_dict().items()})
    publish(PUBLISHED, tmp_path / "checkpoint", network.state_dict())
    model, processor = load_model(tmp_path / "checkpoint", CPU, torch.float32), load_processor(tmp_path / "checkpoint")
    for seconds, batch in batches(store):
        wave = together(batch, store, seconds)
        mel = Features()(wave, batch["total"] // 160, torch.zeros_like(batch["bank"]))
        with torch.no_grad():
            embeds, _ = network.thinker.audio_tower(mel, batch["rows"])
            logits = network.thinker.model(batch["ids"], embeds, batch["begin"], batch["rows"])
        at = {name: int(value[0]) for name, value in batch.items() if value.ndim == 1}
        item = processor.item(wave[0, 200 : 200 + at["total"]].numpy())
        assert largest_difference(encode(model.encoder, [item], CPU), embeds[0, : at["rows"]]) < 2e-4
        ids = batch["ids"][0].tolist()
        said = ids[at["answer"] : at["length"]]
        context = processor.tokenizer.decode(ids[3 : at["begin"] - 6]).decode()
        prompt = processor.prompt(item, context=context)
        front = [0 if token == processor.config.audio_token_id else token for token in prompt.token_ids.tolist()]
        assert front == ids[: at["answer"]]
        _, steps, _ = generate(model, prompt, len(said), forced=said)
        assert largest_difference(steps, logits[0, at["answer"] - 1 : at["length"] - 1]) < 2e-3


def test_items_say_their_texts_and_phones(store: Store) -> None:
    heard = list[str]()
    for seconds, batch in batches(store):
        wanted = phones(batch, store, seconds)
        for row, (first, end) in enumerate(zip(batch["answer"].tolist(), batch["length"].tolist(), strict=True)):
            heard.append(text_of(batch["ids"][row, first:end].tolist()))
            if sounds := {k for k, part in enumerate(TEXTS, 1) if part in heard[-1]}:
                assert set(wanted[row].unique().tolist()) - {0, 255} == sounds
    assert any(TEXTS[0] in text for text in heard) and any("language None" in text for text in heard)


def test_a_step_changes_all_weights(data: Path) -> None:
    options = Namespace(data=data, seed=0, hours=0.1, least=0.001, audio=8, resume=None)
    trainer = Trainer(options)
    first = {name: value.clone() for name, value in trainer.network.state_dict().items()}
    losses = [trainer.step(1e-5, 0.0) for _ in range(2)]
    assert all(torch.isfinite(value) for part in losses for value in part.values())
    changed = [name for name, value in trainer.network.state_dict().items() if not torch.equal(value, first[name])]
    assert len(changed) == len(first)
