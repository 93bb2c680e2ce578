"""How the memory of a device is divided among models, graphs and caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.engine.core.worker import MemoryRequirements, ModelWorker
from service.engine.memory import MemoryPlanError, Reserved, Room, plan_pages, reserve, split_pages
from service.graphs.pool import GraphPool
from service.link.config import EngineConfig, ModelConfig

GIB = 1 << 30


@dataclass
class FakeWorker:
    name: str
    page_bytes: int
    max_pages: int = 10**9
    min_pages: int = 1
    required: MemoryRequirements = field(default_factory=MemoryRequirements)

    def measure(self) -> MemoryRequirements:
        return self.required


def config(*models: str, **settings: object) -> EngineConfig:
    return EngineConfig(models=tuple(ModelConfig(name, "") for name in models), **settings)


def workers(*made: FakeWorker) -> list[ModelWorker]:
    return list(made)  # type: ignore[arg-type]


def test_models_get_equal_shares_of_bytes_and_what_others_cannot_use() -> None:
    made = workers(FakeWorker("a", 100), FakeWorker("b", 100), FakeWorker("c", 50))
    assert split_pages(made, 12_000) == {"a": 40, "b": 40, "c": 80}
    assert split_pages(workers(FakeWorker("a", 100, max_pages=5), made[1]), 10_000) == {"a": 5, "b": 95}


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 100)), min_size=1, max_size=5), st.integers(0, 10**5))
def test_pages_never_take_more_than_is_left(sizes: list[tuple[int, int]], left: int) -> None:
    made = [FakeWorker(str(i), size, max_pages=most) for i, (size, most) in enumerate(sizes)]
    pages = split_pages(workers(*made), left)
    assert sum(pages[w.name] * w.page_bytes for w in made) <= left
    assert all(pages[w.name] <= w.max_pages for w in made)


def room(used: int, total: int) -> Callable[[], Room]:
    return lambda: Room(total, used)


@pytest.mark.parametrize(
    ("total", "graphs", "embeddings", "slots"),
    [(None, 4, 1, 64), (80 * GIB, 4, 1, 128), (40 * 10**9, 4, 1, 128), (24 * GIB, 3, 0.75, 64), (8 * GIB, 1, 0.25, 64)],
)
def test_the_size_of_a_gpu_decides_about_graphs_pictures_and_slots(
    total: int | None, graphs: float, embeddings: float, slots: int
) -> None:
    found = config("a", gpu_bytes=total)
    assert (found.graph_bytes, found.encoder_cache_bytes, found.slots) == (graphs * GIB, embeddings * GIB, slots)
    told = config("a", graph_memory=5 * GIB, encoder_cache=2 * GIB, max_running=7, gpu_bytes=total)
    assert (told.graph_bytes, told.encoder_cache_bytes, told.slots) == (5 * GIB, 2 * GIB, 7)


@pytest.mark.parametrize(
    ("used", "settings", "graphs", "pages"),
    [
        (10, {}, 3, 8),  # an eighth of 24 GiB
        (16, {}, 2.5, 2),  # half of what is left
        (18, {}, 1, 2),  # what the fewest pages leave
        (19, {}, 0, 2),  # nothing
        (20, {}, 0, 1),
        (16, {"graph_memory": 4 * GIB}, 4, 1),
        (16, {"kv_cache_tokens": 32}, 2, 3),  # what these positions leave
        (16, {"graphs": False}, 0, 5),
    ],
)
def test_graphs_leave_room_for_pages(used: int, settings: dict[str, Any], graphs: float, pages: int) -> None:
    given = config("a", memory_share=0.875, **settings, gpu_bytes=24 * GIB)
    made, pool = workers(FakeWorker("a", GIB, min_pages=2)), GraphPool(torch.device("cpu"), given.graph_bytes)
    found = reserve(given, made, room(used * GIB, 24 * GIB))
    assert found is not None and found.graphs == graphs * GIB
    if pages >= 2:
        assert plan_pages(given, made, room(used * GIB, 24 * GIB), pool) == {"a": pages}
        assert pool.limit_bytes == (graphs * GIB if given.graphs else 3 * GIB)
    else:
        with pytest.raises(MemoryPlanError, match=f"model 'a' gets {pages} pages"):
            plan_pages(given, made, room(used * GIB, 24 * GIB))


@pytest.mark.parametrize(
    ("left", "largest", "graphs"),
    [
        (1000, 300, 500),  # half is more
        (1000, 700, 700),
        (1000, 900, 743),  # less 8,192 positions, which are 512 pages of half a MiB and the scratch page
        (400, 300, 200),  # fewer positions anyway: half
        (8000, 7000, 3072),  # an eighth of the GPU
    ],
)
def test_the_largest_graph_finds_room_if_usable_pages_are_left(left: int, largest: int, graphs: int) -> None:
    mib = 1 << 20
    given = config("a", memory_share=1.0, gpu_bytes=24 * GIB)
    required = MemoryRequirements(workspace=largest * mib)
    made = workers(FakeWorker("a", mib // 2, min_pages=33, required=required))
    found = reserve(given, made, room(24 * GIB - (left + largest) * mib, 24 * GIB))
    assert found is not None and found.graphs // mib == graphs
    assert found.left // (mib // 2) >= min(512, left)


def test_memory_is_taken_in_order_and_shared_needs_once() -> None:
    made = workers(
        FakeWorker("a", GIB, required=MemoryRequirements(workspace=3 * GIB, state=GIB)),
        FakeWorker("b", GIB, required=MemoryRequirements(workspace=2 * GIB, state=2 * GIB)),
    )
    both = config("a", "b", memory_share=0.9, graph_memory=4 * GIB)
    full = room(20 * GIB, 80 * GIB)
    assert reserve(both, made, full) == Reserved(72 * GIB, 20 * GIB, 3 * GIB, 4 * GIB, 3 * GIB)
    assert plan_pages(both, made, full) == {"a": 21, "b": 21}
    with pytest.raises(MemoryPlanError, match="captured graph of model 'a'"):
        plan_pages(config("a", "b", graph_memory=GIB), made, full)


def test_over_commitment_fails_and_names_the_model() -> None:
    full = room(70 * GIB, 80 * GIB)
    two = config("a", "b")
    made = workers(FakeWorker("a", GIB, min_pages=0), FakeWorker("b", GIB, min_pages=3))
    with pytest.raises(MemoryPlanError, match="model 'b' gets 1 pages"):
        plan_pages(two, made, full)
    fixed = config("a", "b", kv_cache_tokens=64)
    with pytest.raises(MemoryPlanError, match="kv_cache_tokens: 64 cache positions per model take"):
        plan_pages(fixed, workers(FakeWorker("a", GIB), FakeWorker("b", GIB)), full)


def test_too_few_positions_are_refused_by_the_setting_that_names_them() -> None:
    few = config("a", kv_cache_tokens=320)
    with pytest.raises(MemoryPlanError, match=r"kv_cache_tokens: 320 positions .* model 'a'.* at least 512"):
        plan_pages(few, workers(FakeWorker("a", 100, min_pages=33)), lambda: None)


def test_on_a_cpu_pages_are_sized_by_positions() -> None:
    made = workers(FakeWorker("a", 100), FakeWorker("b", 100, max_pages=7))
    assert plan_pages(config("a", "b"), made, lambda: None) == {"a": 1025, "b": 7}
    few = config("a", "b", kv_cache_tokens=33)
    assert plan_pages(few, made, lambda: None) == {"a": 4, "b": 4}
