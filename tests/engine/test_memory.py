from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.engine.config import EngineConfig, ModelConfig
from service.engine.memory import MemoryPlanError, device_memory, left_for_pages, size_pages, split_pages
from service.engine.worker import MemoryNeeds, ModelWorker

GIB = 1 << 30


@dataclass
class FakeWorker:
    name: str
    page_bytes: int
    max_pages: int = 10**9
    min_pages: int = 1
    needs: MemoryNeeds = field(default_factory=MemoryNeeds)

    def measure(self) -> MemoryNeeds:
        return self.needs


def config(*models: tuple[str, float | None], **settings: object) -> EngineConfig:
    return EngineConfig(models=tuple(ModelConfig(n, "", kv_share=share) for n, share in models), **settings)


def workers(*made: FakeWorker) -> list[ModelWorker]:
    return list(made)  # type: ignore[arg-type]


def test_shares_are_the_operators_and_the_rest_is_split_evenly() -> None:
    three = config(("a", 0.5), ("b", None), ("c", None))
    made = workers(FakeWorker("a", 100), FakeWorker("b", 100), FakeWorker("c", 50))
    assert split_pages(three, made, 10_000) == {"a": 50, "b": 25, "c": 50}


def test_what_a_model_cannot_use_goes_to_the_others() -> None:
    made = workers(FakeWorker("a", 100, max_pages=5), FakeWorker("b", 100))
    assert split_pages(config(("a", None), ("b", None)), made, 10_000) == {"a": 5, "b": 95}


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 100)), min_size=1, max_size=5), st.integers(0, 10**5))
def test_pages_never_take_more_than_is_left(sizes: list[tuple[int, int]], left: int) -> None:
    made = [FakeWorker(str(i), size, max_pages=most) for i, (size, most) in enumerate(sizes)]
    pages = split_pages(config(*((w.name, None) for w in made)), workers(*made), left)
    assert sum(pages[w.name] * w.page_bytes for w in made) <= left
    assert all(pages[w.name] <= w.max_pages for w in made)


def test_memory_is_taken_in_order_and_shared_needs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    needs = {
        "a": MemoryNeeds(workspace=3 * GIB, graphs=GIB, state=GIB),
        "b": MemoryNeeds(workspace=2 * GIB, graphs=2 * GIB, state=2 * GIB),
    }
    one = config(("a", None), ("b", None), memory_share=0.9, graph_memory_bytes=4 * GIB)
    assert left_for_pages(one, needs, torch.device("cuda")) == 72 * GIB - (20 + 3 + 4 + 3) * GIB
    small = config(("a", None), graph_memory_bytes=GIB)
    with pytest.raises(MemoryPlanError, match="recording of model 'b'"):
        left_for_pages(small, needs, torch.device("cuda"))


def test_over_commitment_fails_and_names_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 80 * GIB))
    cuda = torch.device("cuda")
    two = config(("a", None), ("b", None))
    made = workers(FakeWorker("a", GIB, min_pages=0), FakeWorker("b", GIB, min_pages=3))
    with pytest.raises(MemoryPlanError, match="model 'b' gets 0 pages"):
        size_pages(two, made, cuda)
    fixed = config(("a", None), ("b", None), kv_cache_tokens=64)
    with pytest.raises(MemoryPlanError, match="64 cache positions"):
        size_pages(fixed, workers(FakeWorker("a", GIB), FakeWorker("b", GIB)), cuda)


def test_on_a_cpu_pages_are_sized_by_positions() -> None:
    made = workers(FakeWorker("a", 100), FakeWorker("b", 100, max_pages=7))
    assert size_pages(config(("a", None), ("b", None)), made, torch.device("cpu")) == {"a": 1025, "b": 7}
    few = config(("a", None), ("b", None), kv_cache_tokens=33)
    assert size_pages(few, made, torch.device("cpu")) == {"a": 4, "b": 4}


def test_states_of_the_devices_memory_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 26 * GIB)
    states = device_memory(torch.device("cuda"))
    assert states == {"tensors": 20 * GIB, "cached": 6 * GIB, "other": 4 * GIB, "free": 50 * GIB}
    assert device_memory(torch.device("cpu")) == {}
