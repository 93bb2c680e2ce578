"""Captured prefills of any chunks equal eager ones, for every family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.checkpoints.registry import family_of, resolve
from models.interfaces.capturable import Bucket, Plan
from models.protocol import Decoder
from service.engine.chat.slot_state import SlotState
from service.engine.chat.steps import LayersStep, PrefillStep
from service.graphs.buckets import fits
from service.graphs.observations import Observations
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner
from tests.support.devices import DEVICES
from tests.support.golden import GOLDEN, is_chat
from tests.support.paged import PagedCache, PagedSequence
from tests.support.slow import slow

FAMILIES = [
    "qwen2_vl",
    *(
        slow(path.parent.name)
        for path in sorted(GOLDEN.glob("*/config.json"))
        if is_chat(family_of(path.parent)) and path.parent.name != "qwen2_vl"
        if "linear_attention" not in path.read_text()  # Of recurrent state: test_states.py.
    ),
]
PAGE, PAGES, SLOTS = 4, 12, 6
BUCKETS: list[Bucket] = [{"tokens": 9, "sequences": 2}, {"tokens": 20, "sequences": 6}, {"tokens": 40, "sequences": 6}]
NAN = float("nan")


@dataclass
class Prefill:
    """A family's decoder with captured prefills over caches of its own."""

    decoder: Decoder
    width: int
    cache: PagedCache
    state: SlotState
    runner: GraphRunner


@cache
def prefill(family: str, device: str) -> Prefill:
    where = torch.device(device)
    with torch.inference_mode():
        model = resolve(family_of(GOLDEN / family).model)(GOLDEN / family, where, torch.float32, "published")
        decoder = model.decoder
        width = decoder.embed(torch.zeros(1, dtype=torch.int64, device=where)).shape[-1]
        pages = SLOTS * PAGES + 1
        made = PagedCache(decoder.cache_specs(), num_pages=pages, page_size=PAGE, device=where)
        state = SlotState(SLOTS, PAGES, decoder.vocab_size, where)
        step = PrefillStep(LayersStep(decoder, state, made.caches, PAGE), torch.float32, cached=True)
        runner = GraphRunner("test", "prefill", step, BUCKETS, GraphPool(where, 1 << 30), Observations())
        while runner.capture_next(idle=True):
            pass
    assert runner.captured == BUCKETS[::-1]
    return Prefill(decoder, width, made, state, runner)


CHUNKS = st.lists(st.tuples(st.just(0) | st.integers(1, 30), st.integers(1, 14)), min_size=1, max_size=SLOTS)
"""Cached tokens, often none, and new ones."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=8)
@given(
    chunks=CHUNKS.filter(lambda chunks: sum(new for _, new in chunks) <= BUCKETS[-1]["tokens"]), seed=st.integers(0, 99)
)
def test_any_mix_of_chunks_replays_as_it_runs_eagerly(
    family: str, device: str, chunks: list[tuple[int, int]], seed: int
) -> None:
    """Static buffers, the scratch page and whatever is not cached hold NaN before each replay."""
    made = prefill(family, device)
    torch.manual_seed(seed)
    pages = (torch.randperm(SLOTS * PAGES) + 1).view(SLOTS, PAGES)
    tokens = sum(new for _, new in chunks)
    with torch.inference_mode():
        made.state.block_tables.zero_()
        made.state.block_tables[1:] = pages.int()
        hidden = torch.randn(tokens, made.width, device=device)
        _cache_contexts(made, pages, chunks)
        before = _copies(made)
        eager, eager_caches = _eagerly(made, pages, chunks, hidden)
        for layer, values in zip(made.cache.caches, before, strict=True):
            for name in layer:
                layer[name].copy_(values[name])
        replayed, slot_mapping = _replayed(made, pages, chunks, hidden)
        torch.testing.assert_close(replayed, eager, atol=1e-4, rtol=1e-4)
        for layer, values in zip(made.cache.caches, eager_caches, strict=True):
            for name in layer:
                torch.testing.assert_close(layer[name][slot_mapping], values[name][slot_mapping], atol=1e-4, rtol=1e-4)


def _sequences(pages: Tensor, chunks: list[tuple[int, int]]) -> list[PagedSequence]:
    return [PagedSequence(row.tolist(), cached) for row, (cached, _) in zip(pages, chunks, strict=False)]


def _cache_contexts(made: Prefill, pages: Tensor, chunks: list[tuple[int, int]]) -> None:
    for layer in made.cache.caches:
        for values in layer.values():
            values.fill_(NAN)
            for sequence in _sequences(pages, chunks):
                rows = made.cache.rows(sequence, 0, sequence.length)
                values[rows] = torch.randn(len(rows), *values.shape[1:], device=values.device)


def _positions(made: Prefill, chunks: list[tuple[int, int]]) -> Tensor:
    rows = torch.cat([torch.arange(cached, cached + new) for cached, new in chunks])
    return rows.expand(made.decoder.position_axes, -1).to(made.state.ints.device)


def _eagerly(
    made: Prefill, pages: Tensor, chunks: list[tuple[int, int]], hidden: Tensor
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    sequences = _sequences(pages, chunks)
    batch = made.cache.batch(prefills=[(s, new) for s, (_, new) in zip(sequences, chunks, strict=True)])
    out = made.decoder.forward(hidden, _positions(made, chunks), batch)
    return out, _copies(made)


def _copies(made: Prefill) -> list[dict[str, Tensor]]:
    return [{name: values.clone() for name, values in layer.items()} for layer in made.cache.caches]


def _replayed(made: Prefill, pages: Tensor, chunks: list[tuple[int, int]], hidden: Tensor) -> tuple[Tensor, Tensor]:
    ends = np.cumsum([0, *(new for _, new in chunks)]).astype(np.int32)
    rows: list[int] = []
    for sequence, (cached, new) in zip(_sequences(pages, chunks), chunks, strict=True):
        rows += made.cache.rows(sequence, cached, cached + new)
    slot_mapping = torch.tensor(rows, device=hidden.device)
    plan = Plan(
        arrays={
            "cu_seqlens": ends,
            "slots": np.arange(1, len(chunks) + 1),
            "seq_lens": np.array([cached + new for cached, new in chunks], dtype=np.int32),
        },
        tensors={"hidden": [hidden], "positions": [_positions(made, chunks).T], "slot_mapping": [slot_mapping]},
        fills={"cu_seqlens": float(ends[-1])},
        required={"tokens": int(ends[-1]), "sequences": len(chunks)},
    )
    graph = made.runner.graph_for(plan.required)
    assert graph is not None and fits(graph.bucket, plan.required)
    graph.static.device.fill_(255)
    run = made.runner.run(plan)
    assert run.route == "replay"
    return run.outputs["hidden"][: len(hidden)], slot_mapping
