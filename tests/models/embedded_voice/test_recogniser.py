"""The recogniser that judges the embedded voice; no Flite is needed."""

from __future__ import annotations

import argparse
import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from models.embedded.train_recogniser import Hearing, Trainer, Utterances, hear, keep, stretched
from models.embedded.train_recogniser import test as measured
from models.embedded.tune_recogniser import climb, read
from models.embedded.voices.corpus import Reader, Spoken, write
from models.embedded.voices.decoder import (
    Decoder,
    Entry,
    Language,
    Phones,
    Weighing,
    homophones,
    kind_of,
    learn_order,
    learn_phones,
)
from models.embedded.voices.disguise import Ranges, disguise, envelope, moved, series
from models.embedded.voices.flite import PHONES
from models.embedded.voices.gauge import exchanged, nearer
from models.embedded.voices.latents import FRAMES, LATENT_DIM, PATCH
from models.embedded.voices.recogniser import SOUND, WEIGHTS, PhoneNet, Recogniser, load
from models.embedded.voices.words import KNOWN

PLAIN = Weighing(kinds=0.0)
ONES = np.ones(len(PHONES))
EVEN = Phones(ONES / len(PHONES), ONES.astype(np.int64), 3.0 * ONES)
"""Phones that are as frequent and as long as each other."""


def language(ways: dict[str, list[str]], kinds: dict[str, str] | None = None) -> Language:
    entries = {
        word: Entry([way.split(" ") for way in said], 2, (kinds or {}).get(word, word)) for word, said in ways.items()
    }
    return Language(entries, {})


def logs_of(names: list[str], frames: int = 2) -> np.ndarray:
    said = [PHONES.index(phone) for name in names for phone in [name] * frames]
    logs = np.full((len(said), len(PHONES)), -5.0)
    logs[np.arange(len(said)), said] = -0.1
    return logs


FOXES = language(
    {"red": ["r eh d"], "fox": ["f aa k"], "fog": ["f aa g"], "a": ["ax", "ey"], "read": ["r iy d", "r eh d"]}
)


def test_words_are_found_in_phones() -> None:
    """Each phone for two frames, one frame of it misheard; pauses are nobody's."""
    logs = logs_of(["pau", "ey", "r", "eh", "d", "pau", "f", "aa", "k", "pau"])
    logs[4, PHONES.index("r")], logs[4, PHONES.index("f")] = -5.0, -0.1
    decoder = Decoder(FOXES, EVEN, PLAIN)
    assert decoder(logs) in ("a red fox", "a read fox")
    assert decoder(logs[-2:]) == ""
    assert decoder(logs[:0]) == ""


def test_words_that_sound_alike_have_one_name() -> None:
    assert homophones(FOXES.words) == {"red": "read", "fox": "fox", "fog": "fog", "a": "a", "read": "read"}


def test_the_kind_before_decides_between_words_that_sound_nearly_alike() -> None:
    """Between d and t nothing was heard: a noun follows an article, a verb a noun. What was heard is not overruled."""
    words = {"the": ["dh ax"], "fox": ["f aa k s"], "bead": ["b iy d"], "beat": ["b iy t"]}
    kinds = {"fox": "noun", "bead": "noun", "beat": "verb"}
    follows = {"": {"the": 10}, "the": {"noun": 10}, "noun": {"verb": 10}}
    decoder = Decoder(dataclasses.replace(language(words, kinds), follows=follows), EVEN, Weighing(kinds=0.9))
    article, fox, bead = ["pau", "dh", "ax"], ["f", "aa", "k", "s"], ["b", "iy", "d"]
    for names, wanted in ((article + bead, "the bead"), (article + fox + bead, "the fox beat")):
        logs = logs_of(names)
        logs[-2:, PHONES.index("t")] = logs[-2:, PHONES.index("d")] = -1.0
        assert decoder(logs) == wanted
    assert decoder(logs_of(article + fox + bead, frames=4)) == "the fox bead"


def test_a_phone_lasts_as_long_as_it_must() -> None:
    """One frame of a phone that lasts three was misheard: no phone of one frame comes of it."""
    long = dataclasses.replace(EVEN, least=np.full(len(PHONES), 3), mean=4.0 * ONES)
    words = language({"fox": ["f aa k s"], "far": ["f aa"], "cause": ["k s"], "ox": ["aa k s"]})
    logs = logs_of(["f", "aa", "k", "s"], frames=4)
    assert Decoder(words, long, PLAIN)(logs) == "fox"
    assert Decoder(words, long, PLAIN)(logs[4:]) == "ox"
    # Two frames are too few for three phones, and as good as any for one frame each.
    quick = logs_of(["f", "aa", "k", "s"], frames=1)
    assert Decoder(words, EVEN, PLAIN)(quick) == "fox"
    assert Decoder(words, long, PLAIN)(quick) == ""


def test_lengths_of_phones_are_counted() -> None:
    """Of 99 runs of f none is shorter than three frames; every tenth of k is."""
    f, k, pause = (PHONES.index(name) for name in ("f", "k", "pau"))
    runs = [[f] * (3 + number % 4) + [k] * (1 if number % 10 == 0 else 4) + [pause] for number in range(99)]
    found = learn_phones(np.concatenate(runs).astype(np.uint8))
    assert (found.least[f], found.least[k], found.least[pause]) == (3, 1, 1)
    assert found.mean[f] == pytest.approx(4.5, abs=0.05)
    assert found.frequency.sum() == pytest.approx(1.0)
    assert found.mean[PHONES.index("zh")] == 1.0


def test_order_is_counted_up_to_what_is_not_known() -> None:
    kinds = {"the": "the", "fox": "noun", "ran": "verb"}
    order = learn_order(kinds, ["The fox ran.", "the 42 fox", "Fox, ran the xylophone"])
    assert order == {
        "": {"noun": 2, "the": 2},
        "noun": {"": 1, "verb": 2},
        "the": {"noun": 1},
        "verb": {"": 1, "the": 1},
    }


def test_the_end_of_a_sentence_is_expected() -> None:
    """After the article more must come: of two words nearly alike at the end, the noun is taken."""
    words = language({"the": ["dh ax"], "dove": ["dh ah v"], "saw": ["s ao"]}, {"dove": "noun"})
    order = {"": {"saw": 9}, "saw": {"the": 5, "noun": 5}, "the": {"noun": 9}, "noun": {"": 9}}
    logs = logs_of(["s", "ao", "dh", "ah"])
    logs[-2:, PHONES.index("ax")] = logs[-2:, PHONES.index("ah")] = logs[-1, PHONES.index("v")] = -0.7
    decoder = Decoder(dataclasses.replace(words, follows=order), EVEN, Weighing(kinds=0.95))
    assert decoder(logs) == "saw dove"


def test_a_language_is_read_as_it_was_written(tmp_path: Path) -> None:
    given = dataclasses.replace(FOXES, follows={"": {"red": 3}})
    given.save(tmp_path / "lexicon.json")
    assert Language.load(tmp_path / "lexicon.json") == given


def test_kinds_are_the_lists_that_hold_a_word() -> None:
    assert kind_of("garden") == kind_of("kitchen") != kind_of("gardener")
    assert kind_of("the") == "the"
    assert kind_of("xylophone") == "xylophone"


def test_a_softer_voice_is_heard_as_well() -> None:
    net, wave = PhoneNet().eval(), torch.sin(torch.arange(16000) * 0.5)[None] * torch.linspace(0.2, 1.0, 16000)
    loud, soft = (net.features(net.spectrum(gain * wave)) for gain in (1.0, 0.1))
    torch.testing.assert_close(loud, soft, atol=0.05, rtol=0)
    assert net.listen(wave).shape == (1, len(PHONES), 50)


def voice(pitch: float, formant: float) -> Tensor:
    """One second of harmonics under one resonance."""
    time = torch.arange(16000) / 16000
    tones = torch.arange(pitch, 8000, pitch)
    gains = 1.0 / (1.0 + ((tones - formant) / 300.0) ** 2)
    return (gains[:, None] * torch.sin(2 * torch.pi * tones[:, None] * time)).sum(0, keepdim=True)


def test_envelope_and_rest_make_the_spectrum() -> None:
    log = PhoneNet().spectrum(voice(120, 1500))
    places = torch.linspace(0, 1, log.shape[2])[None]
    smooth = envelope(series(log, 30), places)
    assert abs(int(smooth[0, 50].argmax()) * 8000 / 256 - 1500) < 150
    torch.testing.assert_close(smooth + moved(log - smooth, places), log, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("mouth", "pitch"), [(1.3, 1.0), (1.0, 2.0), (0.8, 1.5)])
def test_mouth_and_pitch_are_changed_independently(mouth: float, pitch: float) -> None:
    """The resonance moves with the mouth alone, the distance of the harmonics with the pitch alone."""
    ranges = Ranges((mouth, mouth), (pitch, pitch), bend=0.0, gain=0.0, depth=(1.0, 1.0), noise=(20.0, 20.0))
    changed = disguise(PhoneNet().spectrum(voice(120, 1500)), ranges)
    bands = torch.linspace(0, 1, changed.shape[2])[None]
    coefficients = series(changed, 24)
    peak = int(envelope(coefficients, bands)[0, 50].argmax()) * 8000 / 256
    assert abs(peak - 1500 * mouth) < 200
    rest = (changed - envelope(coefficients, bands))[0, 50, 20:200]
    rest = rest - rest.mean()
    likeness = torch.stack([(rest[lag:] * rest[:-lag]).mean() for lag in range(1, 12)])
    distance = (1 + int(likeness[2:].argmax()) + 2) * 8000 / 256
    assert abs(distance - 120 * pitch) < 35


def test_slower_speech_keeps_its_phones() -> None:
    sounds = torch.arange(10).repeat_interleave(5)[None]
    mel = sounds.float().repeat_interleave(2, 1)[:, None]
    for factor in (0.8, 1.2):
        slow, names = stretched(mel, sounds, factor)
        assert names.shape[1] == int(50 * factor)
        assert (slow[0, 0, ::2].round() == names[0]).float().mean() > 0.9


def spoken(seconds: int) -> Spoken:
    """Two tones that take turns, as two phones."""
    patches = seconds * 16000 // PATCH
    sounds = np.arange(patches * PATCH // SOUND, dtype=np.uint8) // 25 % 2 * 5 + 1
    tones = np.where(sounds.repeat(SOUND) == 1, 0.1, 0.9)
    wave = (8000 * np.sin(tones * np.arange(patches * PATCH))).astype(np.int16)
    frames = patches * FRAMES
    latents = np.zeros((frames, LATENT_DIM), np.float16)
    return Spoken("Fox", "fox", wave, latents, sounds[::2], sounds, np.zeros((patches, 2), np.int16))


@pytest.mark.slow
def test_training_learns_and_saves_its_average(tmp_path: Path) -> None:
    write(tmp_path / "a.npz", [spoken(8), spoken(16)])
    device = torch.device("cpu")
    utterances = Utterances(device, 60)
    utterances.take_in(Reader(tmp_path))
    assert utterances.count == 2
    assert float(utterances.phones().frequency.sum()) == 1.0
    assert utterances.phones().mean[1] == pytest.approx(25, abs=2)
    torch.manual_seed(0)
    random.seed(0)
    trainer = Trainer(argparse.Namespace(rate=2e-3, batch=8), device)
    losses = [float(trainer.step(utterances, 0.0)) for _ in range(40)]
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    trainer.save(tmp_path / WEIGHTS, utterances.phones())
    FOXES.save(tmp_path / "lexicon.json")
    found = load(tmp_path, device).phones(torch.from_numpy(spoken(8).wave).float() / 32768.0)
    assert (found.argmax(1) == spoken(8).sounds).mean() > 0.8


def test_tuning_finds_what_lowers_the_errors() -> None:
    """Of a bowl around other weights than the usual ones it comes close to the lowest point."""
    goal = Weighing(prior=0.5, word=1.0, rarity=2.0, kinds=0.9, lengths=1.2)

    def errors(asked: list[Weighing]) -> list[float]:
        return [sum(abs(np.log(value / vars(goal)[name])) for name, value in vars(each).items()) for each in asked]

    found = list(climb(Weighing(), errors, rounds=12))
    best, least = found[-1]
    assert found[0] == (Weighing(), errors([Weighing()])[0])
    assert [value for _, value in found] == sorted((value for _, value in found), reverse=True)
    assert least == errors([best])[0] < 0.25 * found[0][1]
    assert best.kinds == 0.9


def test_what_was_heard_is_read_by_utterances(tmp_path: Path) -> None:
    logs = logs_of(["f", "aa", "k", "s", "pau"])
    values = {"logs": logs.astype(np.float16), "sounds": logs.argmax(1).astype(np.uint8)}
    np.savez(tmp_path / "heard.npz", **values, texts=np.array(["fox", ""]), frames=np.array([8, 2]))
    for most in (1, 2):
        found = read([tmp_path / "heard.npz"] * 2, most)
        assert [(len(log), text) for log, text in found] == [(8, "fox"), (2, "")][:most] * 2
        np.testing.assert_allclose(found[0][0], logs[:8], atol=1e-3)


def test_hearings_are_measured_and_kept(tmp_path: Path) -> None:
    """The first utterance is heard as it was said, of the second one a phone is wrong, and so the word."""
    right, wrong = logs_of(["f", "aa", "k"]), logs_of(["f", "aa", "g"])
    sounds = right.argmax(1).astype(np.uint8)
    heard = [Hearing(right, sounds, "Fox"), Hearing(wrong, sounds, "fox")]
    net = PhoneNet()
    recogniser = Recogniser(net, Decoder(FOXES, EVEN, PLAIN), homophones(FOXES.words), EVEN)
    found = measured(recogniser, heard, 2)
    assert (found["words"], found["utterances"]) == (0.5, 2)
    assert found["characters"] == pytest.approx(1 / 6, abs=1e-4)
    assert found["frames"] == pytest.approx(10 / 12, abs=1e-4)
    assert measured(recogniser, heard, 1)["words"] == 0.0
    keep(tmp_path / "heard.npz", heard)
    assert [(len(log), text) for log, text in read([tmp_path / "heard.npz"], 9)] == [(6, "Fox"), (6, "fox")]


def test_what_is_feigned_is_heard_differently(tmp_path: Path) -> None:
    write(tmp_path / "a.npz", [spoken(2), dataclasses.replace(spoken(1), text="7 foxes")])
    recogniser = Recogniser(PhoneNet().eval(), Decoder(FOXES, EVEN, PLAIN), {}, EVEN)
    device = torch.device("cpu")
    (plain,), (again,), (feigned,) = (
        hear(recogniser, tmp_path, device, 5, feigned=feigned) for feigned in (False, False, True)
    )
    np.testing.assert_array_equal(plain.logs, again.logs)
    np.testing.assert_array_equal(plain.sounds, feigned.sounds)
    assert len(plain.logs) == len(plain.sounds) == len(feigned.logs)
    assert np.abs(plain.logs - feigned.logs).max() > 1e-3


def test_one_known_word_takes_the_place_of_another() -> None:
    text = "Anna saw a fox, and ran."
    for seed in range(20):
        words, changed = text.split(), exchanged(text, random.Random(seed)).split()
        different = [pair for pair in zip(words, changed, strict=True) if pair[0] != pair[1]]
        assert len(different) == 1
        written, said = different[0]
        assert said.strip(",.").lower() in KNOWN
        assert written[-1].isalpha() == said[-1].isalpha()
        assert written[0].isupper() == said[0].isupper()


@pytest.mark.parametrize(
    ("heard", "yes"), [("a cow ran", True), ("a fox ran", False), ("a cow", True), ("the owl ran", False)]
)
def test_what_was_said_is_heard_or_what_was_written(heard: str, yes: bool) -> None:
    assert nearer(heard, "a cow ran", "a fox ran") == yes
