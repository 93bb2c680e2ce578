"""Flite's voices (CMU) by way of its shared libraries: samples, phone times, pitch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_short, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SAMPLE_RATE = 16000
PITCH_SECONDS = 0.005
"""Between two values of Utterance.pitch."""
_NAMES = "pau aa ae ah ao aw ax ay b ch d dh eh er ey f g hh ih iy jh k l m n ng ow oy p r s sh t th uh uw v w y z zh"
PHONES = tuple(_NAMES.split(" "))


class _Wave(Structure):
    _fields_ = (
        *(("type", c_char_p), ("sample_rate", c_int), ("num_samples", c_int), ("num_channels", c_int)),
        ("samples", POINTER(c_short)),
    )


class _Track(Structure):
    _fields_ = (
        *(("type", c_char_p), ("num_frames", c_int), ("num_channels", c_int), ("times", POINTER(c_float))),
        ("frames", POINTER(POINTER(c_float))),
    )


class _Voice(Structure):
    """Its first fields."""

    _fields_ = (("name", c_char_p), ("features", c_void_p))


class _Utterance(Structure):
    _fields_ = (("features", c_void_p),)


_SIGNATURES = (
    ("feat_set_float", None, c_void_p, c_char_p, c_float),
    ("flite_synth_text", c_void_p, c_char_p, c_void_p),
    ("delete_utterance", None, c_void_p),
    ("utt_wave", c_void_p, c_void_p),
    ("utt_relation", c_void_p, c_void_p, c_char_p),
    ("relation_head", c_void_p, c_void_p),
    ("item_next", c_void_p, c_void_p),
    ("item_as", c_void_p, c_void_p, c_char_p),
    ("item_parent", c_void_p, c_void_p),
    ("item_feat_string", c_char_p, c_void_p, c_char_p),
    ("item_feat_float", c_float, c_void_p, c_char_p),
    ("feat_present", c_int, c_void_p, c_char_p),
    ("feat_val", c_void_p, c_void_p, c_char_p),
    ("val_track", c_void_p, c_void_p),
)


@dataclass(frozen=True, eq=False)
class Utterance:
    """samples int16 [n] at 16 kHz; phones as numbers in PHONES with their ends in seconds and the number of the word
    of the text (parted by blanks) that each belongs to, -1 for a pause; spoken: the words as spoken ("forty two");
    pitch float32 [frames] in Hz, 0 where there is no voice, and empty for voices that do not tell."""

    samples: np.ndarray
    phones: np.ndarray
    ends: np.ndarray
    words: np.ndarray
    spoken: str
    pitch: np.ndarray


class Flite:
    """One voice ("slt", "rms", "awb", "kal16"), in this process.

    library: directory of libflite's files, or None where the linker finds them. Raises OSError when it does not."""

    def __init__(self, voice: str, library: Path | None = None) -> None:
        def load(name: str) -> ctypes.CDLL:
            file = f"lib{name}.so.1"
            return ctypes.CDLL(str(library / file) if library else file, ctypes.RTLD_GLOBAL)

        self._lib = load("flite")
        load("flite_cmulex")
        load("flite_usenglish")
        voices = load(f"flite_cmu_us_{voice}")
        self._lib.flite_init()
        register = getattr(voices, f"register_cmu_us_{voice}")
        register.restype, register.argtypes = c_void_p, [c_char_p]
        self._voice = register(None)
        for name, result, *arguments in _SIGNATURES:
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments
        self._features = ctypes.cast(self._voice, POINTER(_Voice)).contents.features

    def set(self, name: str, value: float) -> None:
        """A feature of the voice: duration_stretch (1 is the voice's own), int_f0_target_mean (Hz)."""
        self._lib.feat_set_float(self._features, name.encode(), value)

    def speak(self, text: str) -> Utterance:
        lib = self._lib
        utterance = lib.flite_synth_text(text.encode(), self._voice)
        try:
            wave = ctypes.cast(lib.utt_wave(utterance), POINTER(_Wave)).contents
            samples = np.ctypeslib.as_array(wave.samples, (wave.num_samples,)).copy()
            phones, ends, words = self._segments(utterance)
            return Utterance(samples, phones, ends, words, self._spoken(utterance), self._pitch(utterance))
        finally:
            lib.delete_utterance(utterance)

    def _items(self, utterance: int, relation: bytes) -> Iterator[int]:
        lib = self._lib
        item = lib.relation_head(lib.utt_relation(utterance, relation))
        while item:
            yield item
            item = lib.item_next(item)

    def _segments(self, utterance: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        lib = self._lib
        tokens = {item: number for number, item in enumerate(self._items(utterance, b"Token"))}
        phones, ends, words = [], [], []
        for item in self._items(utterance, b"Segment"):
            phones.append(PHONES.index(lib.item_feat_string(item, b"name").decode()))
            ends.append(lib.item_feat_float(item, b"end"))
            words.append(self._token_of(item, tokens))
        return np.array(phones, np.int8), np.array(ends, np.float32), np.array(words, np.int16)

    def _token_of(self, segment: int, tokens: dict[int, int]) -> int:
        """Up from a phone: its syllable, its word, and the token that the word was made of."""
        lib, item = self._lib, self._lib.item_as(segment, b"SylStructure")
        for _ in range(2):
            item = lib.item_parent(item) if item else None
        item = lib.item_as(item, b"Token") if item else None
        item = lib.item_parent(item) if item else None
        return tokens.get(item, -1) if item else -1

    def _spoken(self, utterance: int) -> str:
        names = (self._lib.item_feat_string(item, b"name").decode() for item in self._items(utterance, b"Word"))
        return " ".join(names)

    def _pitch(self, utterance: int) -> np.ndarray:
        lib = self._lib
        features = ctypes.cast(utterance, POINTER(_Utterance)).contents.features
        if not lib.feat_present(features, b"param_track"):
            return np.zeros(0, np.float32)
        track = ctypes.cast(lib.val_track(lib.feat_val(features, b"param_track")), POINTER(_Track)).contents
        return np.array([track.frames[frame][0] for frame in range(track.num_frames)], np.float32)
