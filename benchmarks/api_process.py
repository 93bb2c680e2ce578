"""The API process alone, on a CPU: its cost of tokens, speech and requests, and how much it delays a first token.

    python -m benchmarks.api_process [decode] [speech] [requests] [parts] [first] [processes]

An engine without a model answers at a GPU's rate (benchmarks.servers.paced) and clients that parse nothing take it
(benchmarks.loads.raw_client), each in a process of its own. Costs are processor time of the API process, all its
threads together, so that they are valid even on a busy machine; rates and latencies are valid only if three cores are
free.
"""

from __future__ import annotations

import argparse
import base64
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from benchmarks.checkpoints.published import make
from benchmarks.loads.raw_client import Answer, Errand, collect, started
from benchmarks.measure.record import Row, table, write
from benchmarks.servers.footprint import children, inspect
from benchmarks.servers.process import Server, random_weights, serve
from models.media import ChatMessage, ContentPart, source_digest
from models.processor import ChatProcessor
from service.api.chat.schema import ChatRequestBody
from service.catalog import load_catalog
from service.cli.bench.spec import ChatLoad, SpeechLoad
from service.cli.bench.traffic import payload, picture
from service.link import wire
from service.link.messages import ChatRequest, SamplingParams
from service.media.data_url import decode_base64
from service.media.image_decode import decode_image
from service.media.limits import ImageLimits
from service.settings import load_settings

CHAT, SPEECH = "qwen2_vl_7b", "voxcpm2"
STREAMS, TOKENS = 128, 256
LISTENERS, PATCHES = 64, 63
PATCH_SECONDS = 0.16
STEP = 0.003
"""Seconds between tokens of 128 rows on an H100."""
SPEECH_STEP = 0.017
"""The same between patches of 64 streams."""
UNHURRIED = 15
"""With this many times the step, the API process never falls behind, so that every token is an event of its own."""
REPEATS = 200
PROCESSES = (1, 2, 4)
ENDLESS = 30_000
"""Tokens of an answer that outlasts the measurement."""
CHAT_PATH, SPEECH_PATH = "/v1/chat/completions", "/v1/audio/speech"


@contextmanager
def _server(model: str, step: float, *more: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        flags = random_weights([make(model, Path(folder))])
        flags += ["--max-in-flight", "1024", "--media-threads", "8", "--log-level", "warning", *more]
        if "--api-processes" not in more:
            flags += ["--api-processes", "1"]
        with serve(*flags, environment={"REPRISE_PACE": str(step)}, program=["benchmarks.servers.paced"]) as server:
            yield server


def _processor_seconds(pid: int) -> float:
    """User and system time so far of a server's API process, or of several and their supervisor together."""
    return sum(_own_seconds(each) for each in (pid, *children(pid)) if each == pid or _is_api(each))


def _is_api(pid: int) -> bool:
    process = inspect(pid)
    return process is not None and process.role == "api"


def _own_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _errand(server: Server, path: str, bodies: list[Any], lanes: int, requests: int) -> Errand:
    address = urlsplit(server.url)
    assert address.hostname is not None and address.port is not None
    encoded = [msgspec.json.encode(body) for body in bodies]
    return Errand(address.hostname, address.port, path, encoded, lanes, requests)


def _measured(server: Server, errand: Errand) -> tuple[list[Answer], float, float]:
    """The answers to an errand, the processor seconds that they took, and the seconds that passed."""
    with started(msgspec.structs.replace(errand, requests=errand.lanes)) as process:
        collect(process)
    before = _processor_seconds(server.pid)
    with started(errand) as process:
        answers = collect(process)
    spent = _processor_seconds(server.pid) - before
    return answers, spent, max(a.ended for a in answers) - min(a.began for a in answers)


def _chat_bodies(images: int, side: int, characters: int, tokens: int, count: int = 8, **fields: Any) -> list[Row]:
    load = ChatLoad(
        url="",
        model=CHAT,
        requests=count,
        seed=0,
        images=images,
        width=side,
        height=side,
        text_characters=characters,
        output_tokens=tokens,
    )
    rng = np.random.default_rng(0)
    return [{**payload(load, rng), **fields} for _ in range(count)]


def _speech_bodies(patches: int, response_format: str) -> list[Row]:
    load = SpeechLoad(
        url="", model=SPEECH, requests=1, seed=0, seconds=patches * PATCH_SECONDS, response_format=response_format
    )
    rng = np.random.default_rng(0)
    return [payload(load, rng) for _ in range(8)]


def decode() -> list[Row]:
    """128 streams of 256 tokens: slow, slow with stop strings, and at an H100's rate."""
    kinds: dict[str, tuple[float, Row]] = {
        "unhurried": (UNHURRIED * STEP, {}),
        "unhurried, stop strings": (UNHURRIED * STEP, {"stop": ["###", "User:"]}),
        "at the rate of an H100": (STEP, {}),
    }
    rows = []
    for kind, (step, fields) in kinds.items():
        with _server(CHAT, step) as server:
            bodies = _chat_bodies(0, 0, 100, TOKENS, **fields)
            answers, spent, wall = _measured(server, _errand(server, CHAT_PATH, bodies, STREAMS, 2 * STREAMS))
        tokens = TOKENS * len(answers)
        rows.append(
            {
                "streams": STREAMS,
                "step_ms": 1e3 * step,
                "kind": kind,
                "tokens_per_s": tokens / wall,
                "tokens_per_event": tokens / sum(answer.events for answer in answers),
                "cpu_us_per_token": 1e6 * spent / tokens,
                "cpu_s_per_1000_tokens": 1e3 * spent / tokens,
                "busy": spent / wall,
            }
        )
    return rows


def speech() -> list[Row]:
    """64 streams of 10 s: slow, and at an H100's rate, as samples and as mp3."""
    rows = []
    for step, response_format in ((UNHURRIED * SPEECH_STEP / 3, "pcm"), (SPEECH_STEP, "pcm"), (SPEECH_STEP, "mp3")):
        with _server(SPEECH, step) as server:
            bodies = _speech_bodies(PATCHES, response_format)
            answers, spent, wall = _measured(server, _errand(server, SPEECH_PATH, bodies, LISTENERS, 2 * LISTENERS))
        chunks = PATCHES * len(answers)
        rows.append(
            {
                "streams": LISTENERS,
                "step_ms": 1e3 * step,
                "format": response_format,
                "audio_s_per_s": PATCH_SECONDS * chunks / wall,
                "cpu_us_per_chunk": 1e6 * spent / chunks,
                "busy": spent / wall,
            }
        )
    return rows


def requests() -> list[Row]:
    """One token or one patch each, four at a time: the cost of a request apart from its tokens."""
    kinds: dict[str, tuple[str, str, list[Row]]] = {
        "32 text tokens": (CHAT, CHAT_PATH, _chat_bodies(0, 0, 20, 1)),
        "448 x 448 JPEG, 128 text tokens": (CHAT, CHAT_PATH, _chat_bodies(1, 448, 110, 1)),
        "8 JPEGs of 224 x 224, 32 text tokens": (CHAT, CHAT_PATH, _chat_bodies(8, 224, 20, 1)),
        "speech, 12 words": (SPEECH, SPEECH_PATH, _speech_bodies(1, "pcm")),
    }
    rows = []
    for kind, (model, path, bodies) in kinds.items():
        with _server(model, STEP) as server:
            answers, spent, wall = _measured(server, _errand(server, path, bodies, 4, 2 * REPEATS))
        count = len(answers)
        rows.append({"request": kind, "cpu_ms_per_request": 1e3 * spent / count, "requests_per_s": count / wall})
    return rows


def parts() -> list[Row]:
    """Where the time of a request with eight pictures goes: each part separately, in one thread of this process."""
    with tempfile.TemporaryDirectory() as folder:
        directory = make(CHAT, Path(folder))
        catalog = load_catalog(load_settings({"model": (str(directory),), "load_format": "random"}))
        processor: ChatProcessor = catalog.models[0].chat_processor  # read from the directory at first use
    body = msgspec.json.encode(_chat_bodies(8, 224, 20, 1)[0])
    jpeg = picture(np.random.default_rng(0), 224, 224)
    payload_text = base64.b64encode(jpeg).decode()
    limits = ImageLimits()
    decoded = decode_image(jpeg, field="", limits=limits)
    source = source_digest(jpeg)
    item = processor.image(decoded, source=source)
    content = (*(ContentPart(item=index) for index in range(8)), ContentPart(text="w" * 20))
    messages = [ChatMessage("system", (ContentPart(text="s" * 16),)), ChatMessage("user", content)]
    chat = processor.apply_chat_template(messages, ["image"] * 8, options={})
    prompt = processor.expand_placeholders(chat, [item] * 8)
    command = ChatRequest("request", CHAT, prompt, SamplingParams(1), 0.0)
    steps: dict[str, tuple[int, Callable[[], object]]] = {
        "parse the body": (1, lambda: msgspec.json.decode(body, type=ChatRequestBody)),
        "base64": (8, lambda: decode_base64(payload_text, field="", max_bytes=limits.max_bytes)),
        "JPEG": (8, lambda: decode_image(jpeg, field="", limits=limits)),
        "hash": (8, lambda: source_digest(jpeg)),
        "resize, lay out": (8, lambda: processor.image(decoded, source=source)),
        "template, tokens": (1, lambda: processor.apply_chat_template(messages, ["image"] * 8, options={})),
        "placeholders, positions": (1, lambda: processor.expand_placeholders(chat, [item] * 8)),
        "wire": (1, lambda: wire.encode(command)),
    }
    return [
        {"part": name, "times": times, "cpu_ms": 1e3 * times * _seconds(step)} for name, (times, step) in steps.items()
    ]


def _seconds(step: Callable[[], object]) -> float:
    """Processor time of this thread for one call: the median of rounds."""
    rounds = []
    for _ in range(15):
        began = time.thread_time()
        for _ in range(20):
            step()
        rounds.append((time.thread_time() - began) / 20)
    return statistics.median(rounds)


def first() -> list[Row]:
    """From sending a request to its first token or audio, of which the engine takes nothing: idle, and while 128
    streams take a token every 3 ms, or 64 a patch every 17 ms."""
    kinds: dict[str, tuple[str, float, str, list[Row], list[Row], int]] = {
        "32 text tokens": (CHAT, STEP, CHAT_PATH, _chat_bodies(0, 0, 20, 2), _chat_bodies(0, 0, 100, ENDLESS), STREAMS),
        "448 x 448 JPEG": (
            CHAT,
            STEP,
            CHAT_PATH,
            _chat_bodies(1, 448, 110, 2),
            _chat_bodies(0, 0, 100, ENDLESS),
            STREAMS,
        ),
        "speech": (
            SPEECH,
            SPEECH_STEP,
            SPEECH_PATH,
            _speech_bodies(1, "pcm"),
            _speech_bodies(ENDLESS // 8, "pcm"),
            LISTENERS,
        ),
    }
    rows = []
    for kind, (model, step, path, bodies, together, streams) in kinds.items():
        for busy in (False, True):
            with _server(model, step) as server:
                errand = _errand(server, path, bodies, 1, REPEATS)
                if busy:
                    with started(_errand(server, path, together, streams, streams)):
                        time.sleep(1.0)
                        answers, _, _ = _measured(server, errand)
                else:
                    answers, _, _ = _measured(server, errand)
            p10, p50, p90 = np.quantile([1e3 * answer.first for answer in answers], (0.1, 0.5, 0.9))
            rows.append(
                {"request": kind, "together": streams if busy else 0, "p10_ms": p10, "p50_ms": p50, "p90_ms": p90}
            )
    return rows


def processes() -> list[Row]:
    """128 slow streams of 256 tokens, and short requests, by the number of API processes."""
    rows = []
    for count in PROCESSES:
        with _server(CHAT, UNHURRIED * STEP, "--api-processes", str(count)) as server:
            streams = _errand(server, CHAT_PATH, _chat_bodies(0, 0, 100, TOKENS), STREAMS, 2 * STREAMS)
            answers, spent, wall = _measured(server, streams)
            tokens = TOKENS * len(answers)
            row: Row = {"processes": count, "cpu_us_per_token": 1e6 * spent / tokens, "tokens_per_s": tokens / wall}
            short = _errand(server, CHAT_PATH, _chat_bodies(0, 0, 20, 1), 4 * max(PROCESSES), REPEATS)
            answers, spent, wall = _measured(server, short)
            row |= {"cpu_ms_per_request": 1e3 * spent / len(answers), "requests_per_s": len(answers) / wall}
        rows.append(row)
    return rows


RUNS: dict[str, Callable[[], list[Row]]] = {
    "decode": decode,
    "speech": speech,
    "requests": requests,
    "parts": parts,
    "first": first,
    "processes": processes,
}


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.api_process", description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*RUNS, []])
    kinds = parser.parse_args(words).kinds or list(RUNS)
    rows = []
    for kind in kinds:
        found = RUNS[kind]()
        print(table(found), flush=True)
        rows += [{"run": kind, **row} for row in found]
    return write("api_process", rows, device={"name": f"{os.cpu_count()} cores of {_processor()}"})


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


if __name__ == "__main__":
    main()
