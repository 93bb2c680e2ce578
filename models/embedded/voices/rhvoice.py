"""RHVoice's English voices by way of its library: samples of speakers whom Flite does not have ("clb" is a woman).

Only the recogniser is trained on them. The library tells no phones: `alignment` finds their times.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_int, c_short, c_uint, c_void_p
from pathlib import Path

import numpy as np

from models.embedded.voices.flite import SAMPLE_RATE

VOICES = ("bdl", "clb")
"""A man and a woman. RHVoice has slt, too, whom the recogniser must not know."""
_Rate = CFUNCTYPE(c_int, c_int, c_void_p)
_Play = CFUNCTYPE(c_int, POINTER(c_short), c_uint, c_void_p)


class _Callbacks(Structure):
    _fields_ = (
        ("set_sample_rate", _Rate),
        ("play_speech", _Play),
        *((name, c_void_p) for name in ("mark", "word", "word_end", "sentence", "sentence_end", "play_audio", "done")),
    )


class _Start(Structure):
    _fields_ = (
        ("data_path", c_char_p),
        ("config_path", c_char_p),
        ("resource_paths", c_void_p),
        ("callbacks", _Callbacks),
        ("options", c_uint),
    )


class _Manner(Structure):
    _fields_ = (
        ("voice_profile", c_char_p),
        *((f"absolute_{name}", c_double) for name in ("rate", "pitch", "volume")),
        *((f"relative_{name}", c_double) for name in ("rate", "pitch", "volume")),
        ("punctuation_mode", c_int),
        ("punctuation_list", c_char_p),
        ("capitals_mode", c_int),
        ("flags", c_int),
    )


class RHVoice:
    """One voice of VOICES, in this process.

    directory: holds libRHVoice.so and data/, with languages/English and the voices of RHVoice's formats. Raises OSError
    when the library cannot be loaded, and ValueError when it finds nothing to speak with."""

    def __init__(self, voice: str, directory: Path) -> None:
        self._lib = ctypes.CDLL(str(directory / "libRHVoice.so"))
        self._rate, self._parts = 0, [b""]
        self._lib.RHVoice_new_tts_engine.restype = c_void_p
        self._lib.RHVoice_new_message.restype = c_void_p
        self._lib.RHVoice_new_message.argtypes = [
            c_void_p, c_char_p, c_uint, c_int, POINTER(_Manner), c_void_p,
        ]  # fmt: skip
        self._lib.RHVoice_speak.argtypes = [c_void_p]
        self._lib.RHVoice_delete_message.argtypes = [c_void_p]
        # The library keeps pointers to both functions.
        self._callbacks = _Callbacks(_Rate(self._set_rate), _Play(self._take))
        start = _Start(str(directory / "data").encode(), str(directory).encode(), None, self._callbacks, 0)
        self._engine = self._lib.RHVoice_new_tts_engine(ctypes.byref(start))
        if not self._engine:
            raise ValueError(f"no voices of RHVoice in {directory}")
        self.manner = _Manner(voice.encode(), 0, 0, 0, 1, 1, 1, 0, None, 0, 0)

    def _set_rate(self, rate: int, _: object) -> int:
        self._rate = rate
        return 1

    def _take(self, samples: object, count: int, _: object) -> int:
        self._parts.append(ctypes.string_at(samples, 2 * count))  # type: ignore[arg-type]
        return 1

    def set(self, rate: float, pitch: float) -> None:
        """Factors of the voice's own tempo and pitch."""
        self.manner.relative_rate, self.manner.relative_pitch = rate, pitch

    def speak(self, text: str) -> np.ndarray:
        """-> int16 samples at 16 kHz."""
        self._parts = []
        line = text.encode()
        message = self._lib.RHVoice_new_message(self._engine, line, len(line), 0, ctypes.byref(self.manner), None)
        if not message:
            raise ValueError(f"RHVoice does not say {text!r}")
        try:
            self._lib.RHVoice_speak(message)
        finally:
            self._lib.RHVoice_delete_message(message)
        return resampled(np.frombuffer(b"".join(self._parts), np.int16), self._rate)


def resampled(wave: np.ndarray, rate: int) -> np.ndarray:
    """int16 [n] of a higher rate -> int16 [n * 16000 / rate]: the upper part of its spectrum is left out."""
    count = len(wave) * SAMPLE_RATE // rate
    padded = np.pad(wave.astype(np.float64), (0, rate // 10))
    size = len(padded) * SAMPLE_RATE // rate
    short = np.fft.irfft(np.fft.rfft(padded)[: size // 2 + 1], size) * (size / len(padded))
    return np.clip(np.round(short[:count]), -32768, 32767).astype(np.int16)
