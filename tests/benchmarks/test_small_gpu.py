"""What the servers on a small GPU are asked, and what is kept of them."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.checkpoints.published import make
from benchmarks.servers.memory_log import LONGEST_LINE, memory_facts
from benchmarks.small_gpu import CASES, GIB, SPEECH, counts, loads, shrink
from service.cli.bench.spec import ChatLoad, Record
from service.engine.memory.memory import Room, plan_pages
from service.graphs.observations import Observations
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner
from service.link.config import EngineConfig
from service.system.logs import JsonFormatter, TextFormatter
from tests.graphs.test_allocator import MIB, Work
from tests.support.fake_cuda import GPU, FakeCuda


@pytest.mark.parametrize(("free", "seen"), [(3 * GIB, 3 * GIB), (70 * GIB, 8 * GIB)])
def test_the_engine_sees_a_gpu_of_the_size_that_it_is_told(
    monkeypatch: pytest.MonkeyPatch, free: int, seen: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, 80 * GIB))
    large = SimpleNamespace(name="large", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: large)
    shrink(8 * GIB)
    assert torch.cuda.mem_get_info("cuda:0") == (seen, 8 * GIB)
    properties = torch.cuda.get_device_properties("cuda:0")
    assert (properties.name, properties.total_memory) == ("large", 8 * GIB)


@pytest.mark.parametrize("model", [case.model for case in CASES])
def test_the_last_picture_is_the_largest_that_the_processor_does_not_shrink(tmp_path: Path, model: str) -> None:
    server = SimpleNamespace(url="http://nowhere", models=lambda: [model])
    asked = dict(loads(server, model, make(model, tmp_path)))  # type: ignore[arg-type]
    if model == SPEECH:
        assert list(asked) == ["speech", "long"]
        return
    assert list(asked) == ["chat", "large", "largest"]
    largest = asked["largest"]
    assert isinstance(largest, ChatLoad) and (largest.requests, largest.images) == (1, 1)
    assert largest.width == largest.height == (4096 if "qwen3" in model else 3584)


def test_a_refusal_is_a_finding() -> None:
    load = ChatLoad(url="", model="", requests=2, seed=0)
    good = Record(0.0, 200, first=0.5, duration=1.0, tokens=4, prompt_tokens=16)
    full = Record(0.0, 503, error="refused", message="no memory")
    assert counts(load, [good, full]) == {
        "requests": 2,
        "succeeded": 1,
        "refused": 1,
        "failed": 0,
        "refusals": {"503: no memory": 1},
        "failures": {},
        "wall_s": 1.0,
        "prompt_tokens": 16.0,
    }
    assert counts(load, [full, full])["refusals"] == {"503: no memory": 2}


@contextmanager
def logged(formatter: logging.Formatter) -> Iterator[io.StringIO]:
    stream, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(stream), root.level
    handler.setFormatter(formatter)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()], ids=["json", "text"])
def test_what_a_log_says_of_memory_is_kept(monkeypatch: pytest.MonkeyPatch, formatter: logging.Formatter) -> None:
    cuda = FakeCuda(monkeypatch)
    pool = GraphPool(GPU, 200 * MIB)
    monkeypatch.setattr(GraphPool, "allocate", lambda pool, num_bytes: SimpleNamespace(num_bytes=0, fill=lambda *_: {}))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: io.BytesIO())
    with logged(formatter) as log:
        plan_pages(EngineConfig(models=()), [], lambda: Room(8 * GIB, 5 * GIB))
        for name, sizes in (("decode", [100, 20]), ("vision", [150])):
            work = Work(cuda, sum(sizes), sizes)
            work.name = name
            runner = GraphRunner("m", name, work, [{"rows": 8, "pages": 256}], pool, Observations())
            while runner.capture_next(idle=True):
                pass
        message = f"CUDA out of memory. {'x' * LONGEST_LINE}"
        try:
            raise torch.OutOfMemoryError(message)
        except torch.OutOfMemoryError:
            logging.exception("1 requests of m fail")
    facts = memory_facts(log.getvalue())
    assert facts["planned_bytes"].keys() == {"used", "workspace", "graphs", "state", "pages"}
    assert facts["planned_bytes"]["used"] == 5 * GIB and facts["planned_bytes"]["pages"] > 0
    assert facts["captured_mib"] == {"decode rows=8 pages=256": 120.0}
    assert facts["refused_mib"] == {"vision rows=8 pages=256": 150.0}
    (line,) = facts["out_of_memory_lines"]
    assert line.startswith("torch.OutOfMemoryError: CUDA out of memory. xx") and len(line) == LONGEST_LINE


def test_a_log_without_any_of_it_is_no_error() -> None:
    facts = memory_facts("3\nTraceback\n{}\n")
    assert facts == {"planned_bytes": None, "captured_mib": {}, "refused_mib": {}, "out_of_memory_lines": []}
