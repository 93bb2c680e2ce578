"""`reprise serve` with an engine that launches on a simulated GPU: everything except the GPU is real, down to the
engine's loop.

    REPRISE_DILATION=4 python -m benchmarks.servers.simulated_gpu --port 8000 ...

The engine's process, scheduler, pacing, plans and buffers are those of a server; a miniature of the model stands in for
its networks and computes nothing. A launch takes as long as in the committed results of Qwen2-VL-2B on an H100
(`encoder_qwen2_vl_2b.json`, `decode_qwen2_vl_2b.json`), its results arrive after that time, and every token is token 0.
REPRISE_DILATION multiplies these times and the target for gaps, so that on few cores the rest of the server takes the
same share of a step's time as it would on more.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.measure.record import RESULTS
from benchmarks.servers.own_engine import serve_with
from models.interfaces.capturable import Bucket, BufferSpec, Capturable
from models.interfaces.media import MediaItem
from service.engine import start
from service.engine.chat import encoder as vision
from service.engine.chat import graphs, worker
from service.engine.chat import replay_choice as routes
from service.engine.chat.pacing import ITL_TARGET
from service.engine.engine import Engine
from service.engine.memory.memory import plan_pages
from service.graphs.observations import Observations
from service.graphs.pool import Capture, GraphPool, RouteSeconds
from service.link.config import Channel, EngineConfig

DILATION = float(os.environ.get("REPRISE_DILATION", "1"))
ENTRY = "benchmarks.servers.simulated_gpu:engine"
MODEL = "qwen2_vl_2b"
PAIR = 3.5e-9
"""Seconds of a query and a cached key: of 300 tokens behind 1024 and of 32 x 40 behind 700 in
`cached_prefill_qwen2_vl_2b.json`, an H200's."""
SAMPLE = 1.5e-4
"""Seconds of sampling after a prefill."""
NEVER = 1e3
"""Seconds of an eager run, so long that none is chosen, since there is nothing to run."""


KV_CACHE_TOKENS = 262_144
"""--kv-cache-tokens of a server of it."""
ANY_PAGES = 1 << 20
"""A GPU has one width of block tables, for any sequence."""


class Seconds:
    """Seconds of a launch, interpolated between the measured sizes, and beyond them in proportion."""

    def __init__(self) -> None:
        encoder = _rows(f"encoder_{MODEL}")
        decode = _rows(f"decode_{MODEL}")
        # For pictures of 448 x 448 and packs of them: attention within larger ones costs more.
        patches = [row for row in encoder if row["input"] in ("224x224", "448x448", "16 frames 448x448")]
        self._known = {
            "encoder": _curve((row["patches"], row["graph_ms"]) for row in patches),
            "decode": _curve((row["rows"], row["graph_ms"]) for row in decode if row["kind"] == "decode"),
            "prefill": _curve((row["rows"], row["graph_ms"]) for row in decode if row["kind"] == "prefill"),
        }

    def of(self, kind: str, size: int, pairs: int = 0) -> float:
        sizes, seconds = self._known[kind]
        beyond = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) * max(0, size - sizes[-1])
        return DILATION * (float(np.interp(size, sizes, seconds)) + beyond + PAIR * pairs)


def _rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def _curve(points: Any) -> tuple[list[int], list[float]]:
    sizes, milliseconds = zip(*sorted(points), strict=True)
    return list(sizes), [each / 1e3 for each in milliseconds]


class Stream:
    """Launches run one after the other."""

    def __init__(self) -> None:
        self._free_at = 0.0

    @property
    def free_at(self) -> float:
        """Time at which everything launched so far has run (time.monotonic)."""
        return max(self._free_at, time.monotonic())

    def launch(self, seconds: float) -> None:
        self._free_at = self.free_at + seconds


STREAM = Stream()


class Readback:
    """service.engine.core.readback.Readback of the simulated stream."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, begun: float | None = None) -> None:
        self._host = {name: tensor.clone() for name, tensor in tensors.items()}
        self._begun, self._at = begun, STREAM.free_at

    def ready(self) -> bool:
        return time.monotonic() >= self._at

    def wait(self) -> None:
        while (left := self._at - time.monotonic()) > 0:
            time.sleep(left)

    def seconds(self) -> float | None:
        return None if self._begun is None else self._at - self._begun

    def read(self) -> dict[str, np.ndarray]:
        return {name: tensor.numpy() for name, tensor in self._host.items()}


def mark(device: torch.device) -> float:
    """service.engine.core.readback.mark."""
    return STREAM.free_at


class SimulatedPool(GraphPool):
    """Captures nothing: a replay occupies the stream, and its outputs are zeros with the shapes of forward's
    outputs."""

    def __init__(self, limit_bytes: int, widths: Mapping[str, int]) -> None:
        """widths: of rows of "embeds" and "hidden"."""
        super().__init__(torch.device("cpu"), limit_bytes)
        self._widths = widths
        self._seconds = Seconds()

    def capture(
        self, capturable: Capturable, bucket: Bucket, fill: Callable[[], Mapping[str, Tensor]]
    ) -> Generator[None, None, Capture]:
        yield
        buffers, name = fill(), capturable.name
        if name == "vision":
            seconds = self._seconds.of("encoder", bucket["patches"])
            outputs = {"embeds": torch.zeros(bucket["patches"] // 4, self._widths["embeds"])}
            return _capture(lambda: STREAM.launch(seconds), outputs, seconds)
        if name in ("prefill", "cached_prefill"):
            tokens = bucket["tokens"]

            def prefill() -> None:
                STREAM.launch(self._seconds.of("prefill", tokens, _pairs(buffers)))

            outputs = {"hidden": torch.zeros(tokens, self._widths["hidden"])}
            return _capture(prefill, outputs, self._seconds.of("prefill", tokens))
        rows = bucket["rows"]
        sampling = name.removeprefix("guided_").removesuffix("_full") == "sample"
        seconds = DILATION * SAMPLE if sampling else self._seconds.of("decode", rows)
        outputs = {} if name == "guided_layers" else {"results": torch.zeros((rows, 2), dtype=torch.int32)}
        return _capture(lambda: STREAM.launch(seconds), outputs, seconds)


def _capture(replay: Callable[[], None], outputs: dict[str, Tensor], seconds: float) -> Capture:
    return Capture(replay, outputs, RouteSeconds(NEVER, seconds))


def _pairs(buffers: Mapping[str, Tensor]) -> int:
    """Number of pairs of a query and a key that was cached before its chunk; 0 in a prefill without cached context."""
    if "seq_lens" not in buffers:
        return 0
    lengths = buffers["cu_seqlens"].diff()
    return int((lengths * (buffers["seq_lens"] - lengths).clamp(min=0)).sum())


def without_pixels(encoder: Any) -> None:
    """The pixels of a picture are copied once, as to pinned memory; a GPU would do the rest: cut patches from them and
    write them to the buffers."""
    specs_of = encoder.buffer_specs

    def patchify(item: MediaItem, device: torch.device) -> Tensor:
        np.stack(item.frames)
        return torch.empty((encoder.required([item])["patches"], 1), dtype=torch.uint8)

    def buffer_specs(bucket: Bucket) -> dict[str, BufferSpec]:
        return {**specs_of(bucket), "pixels": BufferSpec((bucket["patches"], 1), torch.uint8)}

    encoder.patchify, encoder.buffer_specs = patchify, buffer_specs


def engine(config: EngineConfig, channel: Channel) -> None:
    """An EngineEntry."""
    worker.Readback = Readback  # type: ignore[misc, assignment]
    vision.mark = mark  # type: ignore[assignment]
    graphs._CPU_PAGES = (ANY_PAGES,)  # type: ignore[assignment]
    routes.PREFILL_TOKENS["cpu"] = routes.PREFILL_TOKENS["cuda"]
    routes.CACHED_PREFILL_TOKENS["cpu"] = routes.CACHED_PREFILL_TOKENS["cuda"]
    config = msgspec.structs.replace(config, itl_target=DILATION * (config.itl_target or ITL_TARGET))
    torch.set_num_threads(1)
    observations = Observations()
    widths: dict[str, int] = {}
    pool = SimulatedPool(config.graph_bytes, widths)
    with torch.inference_mode():
        (model,) = config.models
        chat = start.load_worker(config, model, pool.device, pool, observations)
        assert isinstance(chat, worker.ChatWorker)
        runner = chat._runner
        widths |= {"embeds": runner.embeds_width, "hidden": runner._sizes.hidden_size}
        without_pixels(chat._vision._encoder)
        chat.allocate(plan_pages(config, [chat], lambda: None)[chat.name])
        made = Engine([chat], pool, observations, channel)
        made.capture_first()
        while chat.capture_next(idle=True):
            pass
        runner._routes.pair_seconds = RouteSeconds(DILATION * PAIR, DILATION * PAIR)
        decode, prefill = runner.graphs.decode[False], runner.graphs.cached_prefill
        chat._pacing.start(decode, prefill, chat._vision.runner, DILATION * PAIR)
        gc.collect()
        gc.freeze()
        made.run()


if __name__ == "__main__":
    serve_with(ENTRY, sys.argv[1:])
