"""Voice activity detection: Silero VAD in NumPy, and the turns that its probabilities stand for.

The weights are those of silero_vad.jit in silero-vad 6.2.3 (MIT, see silero_vad.LICENSE); the safetensors file of that
wheel holds older ones. NumPy, since the API process has no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from safetensors.numpy import load_file

from service.system.concurrency import shielded

WEIGHTS = Path(__file__).with_name("silero_vad.safetensors")
RATE = 16_000
WINDOW, CONTEXT = 512, 64
"""Samples of a step, which the network sees behind the last ones of the step before."""
WINDOW_MS = 1000 * WINDOW / RATE
FFT, HOP = 256, 128
HIDDEN = 128
TAPS = 48
"""Length of the resampling filter, in samples of the input."""
HYSTERESIS = 0.15
"""Speech ends below the threshold by this much."""
LONGEST_TURN_MS = 300_000


@cache
def _filters(step: int) -> np.ndarray:
    """float32 [TAPS, 2]: the windowed sinc of the two outputs that `step` samples at step * 8 kHz have at 16 kHz."""
    position = np.arange(TAPS)[:, None] - (TAPS // 2 - 1) - np.arange(2) * step / 2
    cutoff = min(1.0, 2 / step)
    taps = np.sinc(cutoff * position) * np.cos(np.pi * position / (TAPS + 2)) ** 2
    return np.asarray(taps / taps.sum(0), np.float32)


class VoiceStream:
    """The state of a stream of samples. rate: Hz, a multiple of 8,000."""

    def __init__(self, rate: int) -> None:
        self._step = rate // 8000
        self._unfiltered = np.zeros(TAPS - self._step, np.float32)
        self._samples = np.zeros(CONTEXT, np.float32)
        self.state = np.zeros((2, HIDDEN), np.float32)
        """Hidden and cell state of the LSTM."""

    def windows(self, samples: np.ndarray) -> np.ndarray:
        """The next samples, float32 [n], in [-1, 1] -> the windows that they complete, float32 [m, CONTEXT + WINDOW] at
        16 kHz."""
        given = np.concatenate([self._unfiltered, samples])
        groups = max(0, (len(given) - TAPS) // self._step + 1)
        self._unfiltered = given[groups * self._step :]
        if groups:
            filtered = sliding_window_view(given, TAPS)[:: self._step] @ _filters(self._step)
            self._samples = np.concatenate([self._samples, filtered.reshape(-1)])
        size = CONTEXT + WINDOW
        count = (len(self._samples) - CONTEXT) // WINDOW
        cut = sliding_window_view(self._samples, size)[::WINDOW][:count] if count else np.zeros((0, size), np.float32)
        self._samples = self._samples[count * WINDOW :]
        return cut


class SileroVad:
    """The network. It has no state of its own, so that one serves all streams."""

    def __init__(self) -> None:
        weights = load_file(WEIGHTS)
        self._convolutions = [
            # [out, in, tap] -> [tap * in, out]
            (np.ascontiguousarray(weight.transpose(2, 1, 0).reshape(-1, len(weight))), weights[f"{name}.bias"], stride)
            for name, stride in (("encoder.0", 1), ("encoder.1", 2), ("encoder.2", 2), ("encoder.3", 1))
            for weight in [weights[f"{name}.weight"]]
        ]
        rnn = "decoder.rnn"
        self._input = np.ascontiguousarray(weights[f"{rnn}.weight_ih"].T)
        self._recurrent = np.ascontiguousarray(weights[f"{rnn}.weight_hh"].T)
        self._bias = weights[f"{rnn}.bias_ih"] + weights[f"{rnn}.bias_hh"]
        self._head, self._head_bias = weights["decoder.decoder.2.weight"][0, :, 0], weights["decoder.decoder.2.bias"]
        self._hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FFT) / FFT)).astype(np.float32)

    def probabilities(self, streams: Sequence[VoiceStream], windows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The probability of speech in each of the next windows of each stream, float32 [m]."""
        counts = [len(one) for one in windows]
        ends = np.cumsum(counts)
        gates = self._features(np.concatenate(windows)) @ self._input + self._bias
        found = np.zeros(len(gates), np.float32)
        for step in range(max(counts)):
            going = [index for index, count in enumerate(counts) if count > step]
            rows = np.array([ends[index] - counts[index] + step for index in going])
            hidden, cell = np.stack([streams[index].state for index in going], 1)
            entry, forget, candidate, out = np.split(gates[rows] + hidden @ self._recurrent, 4, axis=1)
            cell = _sigmoid(forget) * cell + _sigmoid(entry) * np.tanh(candidate)
            hidden = _sigmoid(out) * np.tanh(cell)
            found[rows] = _sigmoid(np.maximum(hidden, 0) @ self._head + self._head_bias)
            for row, index in enumerate(going):
                streams[index].state = np.stack([hidden[row], cell[row]])
        return np.split(found, ends[:-1])

    def _features(self, windows: np.ndarray) -> np.ndarray:
        """float32 [n, HIDDEN], the input of the LSTM."""
        padded = np.concatenate([windows, windows[:, -2 : -2 - CONTEXT : -1]], axis=1)  # reflected
        starts = range(0, padded.shape[1] - FFT + 1, HOP)
        frames = np.stack([padded[:, start : start + FFT] for start in starts], axis=1) * self._hann
        x = np.abs(np.fft.rfft(frames)).astype(np.float32, copy=False)
        for weight, bias, stride in self._convolutions:
            count, length, width = x.shape
            padded = np.zeros((count, length + 2, width), np.float32)
            padded[:, 1:-1] = x
            taps = np.concatenate([padded[:, tap : tap + length : stride] for tap in range(3)], axis=2)
            rows = taps.reshape(-1, taps.shape[2]) @ weight  # far faster than products by window
            x = np.maximum(rows + bias, 0).reshape(*taps.shape[:2], len(bias))
        return x[:, 0]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * x))


@dataclass(eq=False)
class _Waiting:
    stream: VoiceStream
    samples: np.ndarray
    found: np.ndarray | None = None


class VoiceActivity:
    """Runs the network in a thread, for all streams at once that have got samples meanwhile."""

    def __init__(self) -> None:
        self._network: SileroVad | None = None
        self._waiting: list[_Waiting] = []
        self._step: asyncio.Future[None] | None = None

    async def probabilities(
        self, stream: VoiceStream, samples: np.ndarray, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
    ) -> np.ndarray:
        """The probability of speech in each of the windows that the samples, float32 [n], complete."""
        entry = _Waiting(stream, samples)
        self._waiting.append(entry)
        while entry.found is None:
            if self._step is None or self._step.done():
                batch, self._waiting = self._waiting, []
                self._step = asyncio.ensure_future(in_thread(partial(self._run, batch)))
            await shielded(self._step)
        return entry.found

    def _run(self, batch: Sequence[_Waiting]) -> None:
        self._network = self._network or SileroVad()
        windows = [entry.stream.windows(entry.samples) for entry in batch]
        found = self._network.probabilities([entry.stream for entry in batch], windows)
        for entry, probabilities in zip(batch, found, strict=True):
            entry.found = probabilities


@dataclass(frozen=True)
class Boundary:
    """Where a turn begins, the padding before it included, or ends, with the silence behind it. ms: since the
    stream began."""

    starts: bool
    ms: float


@dataclass
class TurnDetector:
    """Probabilities -> turns. A turn begins when two of three windows reach the threshold, and ends after
    `silence_ms` below it."""

    threshold: float
    prefix_ms: float
    silence_ms: float
    speaking: bool = False
    _now: float = 0.0
    """End of the last window, ms."""
    _begun: float = 0.0
    _ended: float = 0.0
    _loud: float | None = None
    """End of the last window that reached the threshold, of the last one with speech while somebody speaks."""

    def update(self, probability: float) -> Boundary | None:
        self._now += WINDOW_MS
        if not self.speaking:
            before, self._loud = self._loud, self._now if probability >= self.threshold else self._loud
            if before is None or self._loud != self._now or self._now - before > 2 * WINDOW_MS:
                return None
            self.speaking, self._begun = True, before - WINDOW_MS
            return Boundary(True, max(self._ended, self._begun - self.prefix_ms))
        if probability >= max(self.threshold - HYSTERESIS, 0.01):
            self._loud = self._now
        assert self._loud is not None
        if self._now - self._loud < max(self.silence_ms, WINDOW_MS) and self._now - self._begun < LONGEST_TURN_MS:
            return None
        self.speaking, self._loud, self._ended = False, None, self._now
        return Boundary(False, self._now)
