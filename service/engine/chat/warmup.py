"""Runs of a chat model's steps over the scratch slot and page, before there are requests: they measure memory and
costs, and compile the kernels of eager runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from models.interfaces.capturable import Plan
from service.engine.chat.drafts import MAX_ROWS
from service.engine.chat.graphs import ChatGraphs
from service.engine.chat.inputs import STATE_BUFFERS
from service.engine.chat.steps import chunk_batch, run_chunks, with_features
from service.engine.core.pages import scratch_chunks
from service.engine.core.worker import WARM_SEQUENCES, WARM_TOKENS
from service.graphs.buckets import powers_of_two
from service.graphs.buffers import upload_arrays

_MEASURED_CONTEXT = 4096
"""Number of cached keys before a chunk, to measure their cost."""


def largest_runs(graphs: ChatGraphs) -> Iterator[Callable[[], object]]:
    """What takes most memory eagerly: the largest prefill, and steps of all slots."""
    config, sizes = graphs.context.config, graphs.sizes
    tokens = min(config.max_step_tokens, sizes.max_pages * sizes.page_size)
    yield partial(scratch_prefill, graphs, [tokens])
    largest = [
        (graphs.decode[True], {"rows": config.slots, "pages": sizes.max_pages}),
        (graphs.guided_sample[True], {"rows": config.slots}),
    ]
    if sizes.drafts:
        rows = min(config.slots, MAX_ROWS)
        largest += [(graphs.verify[True], {"rows": rows, "pages": sizes.max_pages, "drafts": sizes.drafts})]
    # Fewer tokens may take more memory: the kernel splits their keys and keeps partial results (paged_prefill).
    for size in powers_of_two(tokens):
        largest += [(graphs.cached_prefill, {"tokens": size, "sequences": config.slots})]
    for runner, bucket in largest:
        yield runner.filler_run(bucket)


def warm_up(graphs: ChatGraphs) -> Iterator[None]:
    """Runs what may run eagerly: decode steps and prefills of each power of two, prefills with cached context and of
    many sequences. Yields after each."""
    config, sizes = graphs.context.config, graphs.sizes
    rows = powers_of_two(config.slots)
    for full in (False, True):
        yield from graphs.decode[full].warm_up({"rows": count, "pages": sizes.max_pages} for count in rows)
        yield from graphs.verify[full].warm_up(graphs.verify[full].bucket_list)
        yield from graphs.sample[full].warm_up({"rows": count} for count in rows)
        yield from graphs.guided_sample[full].warm_up({"rows": count} for count in rows)
    yield from graphs.layers.warm_up({"rows": count, "pages": sizes.max_pages} for count in rows)
    passes = [([tokens], 0) for tokens in powers_of_two(min(config.max_step_tokens, WARM_TOKENS))]
    for lengths, cached in (*passes, ([1, 2], sizes.page_size), ([1] * WARM_SEQUENCES, 0)):
        scratch_prefill(graphs, lengths, cached=cached)
        yield
    yield from graphs.cached_prefill.warm_up(graphs.cached_prefill.bucket_list[:1])


def pair_seconds(graphs: ChatGraphs) -> float:
    """Seconds of a pair of a query and a cached key, measured with the largest captured prefill; 0 if none is captured
    or the context has no room for cached keys."""
    runner, sizes = graphs.cached_prefill, graphs.sizes
    largest = max(runner.captured, key=lambda bucket: bucket["tokens"], default=None)
    if largest is None:
        return 0.0
    tokens = largest["tokens"]
    cached = min(_MEASURED_CONTEXT, sizes.max_pages * sizes.page_size - tokens)
    if cached <= 0:
        return 0.0

    def replay(keys: int) -> float:
        arrays = {"cu_seqlens": np.array([0, tokens], np.int32), "seq_lens": np.array([keys + tokens], np.int32)}
        plan = Plan(arrays, {**largest, "sequences": 1}, fills={"cu_seqlens": tokens})
        seconds = runner.replay_seconds(plan)
        assert seconds is not None
        return seconds

    return max(0.0, replay(cached) - replay(0)) / (tokens * cached)


def scratch_prefill(graphs: ChatGraphs, lengths: list[int], *, cached: int = 0) -> None:
    """The decoder over prompts of these lengths, each after `cached` keys."""
    decoder, state, sizes = graphs.decoder, graphs.state, graphs.sizes
    zeros = np.zeros(sum(lengths), dtype=np.int64)
    arrays = {
        "tokens": zeros,
        "next_tokens": zeros,
        "positions": np.zeros((decoder.position_axes, len(zeros)), dtype=np.int64),
    } | scratch_chunks(lengths, cached, sizes.page_size)
    if state.states:
        arrays |= {name: np.zeros(len(lengths), dtype=np.int64) for name in STATE_BUFFERS}
    sent = upload_arrays(arrays, graphs.context.device)
    hidden = with_features(decoder.embed(sent["tokens"]), sizes.hidden_size * (1 + decoder.feature_levels))
    batch = chunk_batch(sent, state, graphs.caches, sizes.page_size)
    run_chunks(decoder, hidden, sent["positions"], batch, sent)
