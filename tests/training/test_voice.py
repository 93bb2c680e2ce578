"""What the embedded voice is trained on and judged by; no Flite is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from training.voice.config import AUDIO_START, REFERENCE_END, REFERENCE_START, tokens
from training.voice.corpus import Listener, Reader, Store, prepare, write
from training.voice.flite import PHONES, Utterance
from training.voice.latents import HOP, PATCH, Spectrum
from training.voice.packing import Mixture, Packer, Shape
from training.voice.texts import Shares, Writer

pytestmark = pytest.mark.slow


def said(words: int = 2) -> Utterance:
    """As Flite would say "red fox": a pause, three phones a word of 0.1 s each, a pause."""
    phones = [0, *[PHONES.index(name) for name in ("r", "eh", "d", "f", "aa", "k")][: 3 * words], 0]
    ends = 0.2 + 0.1 * np.arange(len(phones))
    numbers = [-1, *np.repeat(np.arange(words), 3), -1]
    samples = (3000 * np.sin(np.arange(int(ends[-1] * 16000)) * 0.08)).astype(np.int16)
    pitch = np.full(int(ends[-1] / 0.005), 200.0, np.float32)
    return Utterance(
        samples, np.array(phones, np.int8), ends.astype(np.float32), np.array(numbers, np.int16), "red fox", pitch
    )


def test_texts_depend_on_the_seed_alone() -> None:
    first, again, other = ([Writer(seed, ["zebu"]).text() for _ in range(1)] for seed in (5, 5, 6))
    assert first == again
    assert first != other
    texts = [Writer(seed, ["zebu"]).text() for seed in range(200)]
    assert any("zebu" in text.lower() for text in texts)
    assert not any("zebu" in Writer(seed, ["zebu"]).text(Shares(0, 0, 0)).lower() for seed in range(100))
    assert all(text[0].isupper() or text[0].isdigit() for text in texts)


def test_an_utterance_is_cut_to_whole_patches() -> None:
    spoken = prepare("Red fox.", said(), Listener())
    assert len(spoken.wave) == len(spoken.span) * PATCH == len(spoken.latents) * HOP == len(spoken.phones) * HOP
    assert [PHONES[sound] for sound in spoken.sounds[:9:2]] == ["pau", "pau", "r", "r", "eh"]
    # 0.14 of the first pause's 0.2 s go; the last patch but one says the second word.
    assert PHONES[spoken.phones[0]] == "pau"
    # The middle of frame 5 sounds 0.34 s; that of frame 4 lies between two phones.
    assert PHONES[spoken.phones[5]] == "eh"
    assert "Red fox."[slice(*spoken.span[0])] == "Re"
    assert "fox" in "Red fox."[slice(*spoken.span[3])]


def test_the_last_samples_of_a_frame_are_the_last_that_it_hears() -> None:
    """Causal, as the codec's encoder is."""
    spectrum, wave = Spectrum(torch.device("cpu")), torch.randn(4 * HOP)
    changed = wave.clone()
    changed[2 * HOP :] = 0.0
    pitch = torch.full((4,), 190.0)
    torch.testing.assert_close(spectrum(wave, pitch)[:2], spectrum(changed, pitch)[:2])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    listener = Listener()
    write(tmp_path / "b.npz", [prepare("Red fox.", said(), listener)])
    write(tmp_path / "a.npz", [prepare("Red", said(1), listener)] * 2)
    reader, made = Reader(tmp_path), Store(400, torch.device("cpu"))
    made.take_in(reader, 9)
    assert list(reader.new()) == []
    assert [len(text) for text in made.texts] == [3, 3, 8]
    return made


def test_rows_hold_whole_examples(store: Store) -> None:
    shape = Shape(rows=4, length=64, patches=128)
    batch = Packer(store, shape, Mixture(reference=0.5, joined=0.5, described=0.5), 3).batch()
    ids, patches = batch.token_ids, batch.is_patch
    targets = int(batch.weight.sum())
    assert targets > 10
    assert int(patches.sum()) == int((batch.audio_place < 4 * 64).sum())
    assert bool(patches.flatten()[batch.audio_place[batch.audio_place < 4 * 64]].all())
    for index in range(targets):
        place = int(batch.place[index])
        row, column = divmod(place, 64)
        assert patches[row, column + 1]
        before = int(batch.before[index])
        # A first patch follows the sign for speech and has none before it; the others follow their predecessors.
        assert (before == 127) == (int(ids[row, column]) == AUDIO_START)
        if before != 127:
            assert int(batch.audio_place[before]) == place
        assert int(batch.audio_patch[before + 1 if before != 127 else 0]) >= 0
        first, end = batch.span[index].tolist()
        assert 0 <= first < end <= column + 1
        if batch.last[index]:
            assert column + 2 == 64 or batch.documents[row, column + 2] != batch.documents[row, column]
    marks = (ids == REFERENCE_START).sum(), (ids == REFERENCE_END).sum()
    assert marks[0] == marks[1] > 0
    assert (ids == tokens("(")[0]).any()
