"""Closed loops of speech streams against an engine in this process, recorded as our clients record theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.loads.rows import row_of
from service.cli.bench.traffic import Record, SpeechLoad, payload

Speak = Callable[[str], AsyncGenerator[int]]
"""A text to the numbers of samples of its chunks."""


async def closed(speak: Speak, sample_rate: int, streams: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Rows as those of benchmarks.speech_http: the same texts, three utterances a stream after two to warm up."""
    rows = []
    for count in streams:
        load = SpeechLoad(
            url="", model="", requests=3 * count, seed=count, concurrency=count, text_words=13, seconds=seconds
        )
        rng = np.random.default_rng(load.seed)
        texts = [payload(load, rng)["input"] for _ in range(load.requests + 2 * count)]
        await _loop(speak, sample_rate, iter(texts[: 2 * count]), count)
        records = await _loop(speak, sample_rate, iter(texts[2 * count :]), count)
        rows.append({"streams": count, **row_of(load, records)})
    return rows


async def _loop(speak: Speak, sample_rate: int, texts: Iterator[str], lanes: int) -> list[Record]:
    records: list[Record] = []

    async def lane() -> None:
        for text in texts:
            records.append(await _one(speak, sample_rate, text))

    await asyncio.gather(*(lane() for _ in range(lanes)))
    return records


async def _one(speak: Speak, sample_rate: int, text: str) -> Record:
    record = Record(start=time.time(), status=200)
    begin = time.perf_counter()
    playback = 0.0
    async for samples in speak(text):
        now = time.perf_counter()
        if not record.first:
            record.first, playback = now - begin, now
        elif (late := now - playback - record.audio) > 0:
            record.underrun += late
            playback += late
        record.audio += samples / sample_rate
    record.duration = time.perf_counter() - begin
    return record
