"""Runs of a chat model's steps over the scratch slot and page, before there are requests: they measure memory and
costs, and compile the kernels of eager runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, Capturable, Plan
from models.protocol import Decoder
from service.engine.chat.drafts import MAX_ROWS
from service.engine.chat.graphs import ChatGraphs, StepSizes
from service.engine.chat.inputs import STATE_BUFFERS
from service.engine.chat.pacing import chunk_tokens
from service.engine.chat.slot_state import SlotState, allocate_pending, allocate_states, row_bytes
from service.engine.chat.steps import (
    DecodeStep,
    GuidedSampleStep,
    LayersStep,
    PrefillStep,
    Sampling,
    VerifyStep,
    packed_rows,
    run_chunks,
    with_features,
)
from service.engine.core.pages import scratch_chunks
from service.engine.core.worker import WARM_SEQUENCES, WARM_TOKENS, MemoryRequirements, WorkerContext
from service.engine.memory import peak_bytes
from service.graphs.buckets import powers_of_two
from service.graphs.buffers import exact_buffers, upload_arrays
from service.graphs.pool import RouteSeconds, seconds_of

_MEASURED_CONTEXT = 4096
"""Number of cached keys before a chunk, to measure their cost."""


class ScratchRuns:
    """The runs of one model. `measure` runs before the caches are allocated; the others take the model's graphs."""

    def __init__(self, decoder: Decoder, sizes: StepSizes, context: WorkerContext) -> None:
        self._decoder = decoder
        self._sizes = sizes
        self._context = context

    def measure(self, state_rows: int) -> MemoryRequirements:
        """Peak of the largest step with a prefill and of a decode step of all slots, over caches of one page and one
        row of recurrent state, of which there will be `state_rows`."""
        device, config, dtype, sizes = self._context.device, self._context.config, self._context.dtype, self._sizes
        if device.type == "cpu":
            return MemoryRequirements()
        caches = [spec.allocate(1, sizes.page_size, device, dtype) for spec in self._decoder.cache_specs()]
        beside_rows = config.slots + chunk_tokens(config.max_step_tokens, config.slots)
        tokens = min(max(config.max_step_tokens, beside_rows), sizes.max_pages * sizes.page_size)
        states = allocate_states(self._decoder, 1, device)
        pending = allocate_pending(self._decoder, 0, sizes.drafts, device)
        state = SlotState(
            config.slots, sizes.max_pages, sizes.vocab_limit, device, states, pending, sizes.drafts, sizes.history
        )
        prefill = peak_bytes(lambda: self._prefill(caches, [tokens], state), device)
        sampling = Sampling(self._decoder, state, sizes.vocab_limit, full=True)
        step = DecodeStep(LayersStep(self._decoder, state, caches, sizes.page_size), sampling)
        decode = self._peak_of(step, {"rows": config.slots, "pages": sizes.max_pages})
        if sizes.drafts:
            rows = min(config.slots, MAX_ROWS)
            verify = VerifyStep(step.layers, sampling)
            decode = max(
                decode, self._peak_of(verify, {"rows": rows, "pages": sizes.max_pages, "drafts": sizes.drafts})
            )
        cached = PrefillStep(self._decoder, state, caches, sizes.page_size, sizes.hidden_size, dtype, cached=True)
        # Fewer tokens may take more memory: the kernel splits their keys and keeps partial results (paged_prefill).
        for size in powers_of_two(tokens):
            prefill = max(prefill, self._peak_of(cached, {"tokens": size, "sequences": config.slots}))
        held_hidden = torch.zeros((config.slots, sizes.hidden_size), dtype=dtype, device=device)
        guided = self._peak_of(GuidedSampleStep(state, sampling, held_hidden), {"rows": config.slots})
        peak = max(prefill, decode, guided)
        num_bytes = SlotState.num_bytes(config.slots, sizes.max_pages, sizes.vocab_limit, sizes.history)
        num_bytes += held_hidden.nbytes + state_rows * row_bytes(self._decoder.state_specs())
        if sizes.drafts:
            num_bytes += (config.slots + 1) * row_bytes(self._decoder.pending_specs(1 + sizes.drafts))
        return MemoryRequirements(peak, num_bytes)

    def _peak_of(self, step: Capturable, bucket: Bucket) -> int:
        """Bytes at the peak of a pass over buffers of this size."""
        device = self._context.device
        buffers = exact_buffers(step.buffer_specs(bucket), Plan(arrays={}, required=bucket), device)
        return peak_bytes(lambda: step.forward(buffers, bucket), device)

    def warm_up(self, graphs: ChatGraphs) -> Iterator[None]:
        """Runs what may run eagerly: decode steps and prefills of each power of two, prefills with cached context, of
        many sequences, and beside decode rows. Yields after each."""
        config, sizes = self._context.config, self._sizes
        rows = powers_of_two(config.slots)
        for full in (False, True):
            yield from graphs.decode[full].warm_up({"rows": count, "pages": sizes.max_pages} for count in rows)
            yield from graphs.verify[full].warm_up(graphs.verify[full].bucket_list)
            yield from graphs.sample[full].warm_up({"rows": count} for count in rows)
            yield from graphs.guided_sample[full].warm_up({"rows": count} for count in rows)
        yield from graphs.layers.warm_up({"rows": count, "pages": sizes.max_pages} for count in rows)
        passes = [([tokens], 0, 0) for tokens in powers_of_two(min(config.max_step_tokens, WARM_TOKENS))]
        passes += [([1, 2], sizes.page_size, 0), ([1] * WARM_SEQUENCES, 0, 0)]
        if not graphs.state.states:
            passes += [([1], 0, count) for count in rows]
        for lengths, cached, count in passes:
            self._prefill(graphs.caches, lengths, graphs.state, cached=cached, rows=count)
            yield
        yield from graphs.cached_prefill.warm_up(graphs.cached_prefill.bucket_list[:1])

    def pair_seconds(self, graphs: ChatGraphs) -> RouteSeconds | None:
        """Seconds of a pair of a query and a cached key on each route, measured with the largest captured bucket; None
        if none is captured or the context has no room for cached keys."""
        runner = graphs.cached_prefill
        largest = max(runner.captured, key=lambda bucket: bucket["tokens"], default=None)
        if largest is None:
            return None
        tokens = largest["tokens"]
        cached = min(_MEASURED_CONTEXT, self._sizes.max_pages * self._sizes.page_size - tokens)
        if cached <= 0:
            return None

        def replay(keys: int) -> float:
            arrays = {"cu_seqlens": np.array([0, tokens], np.int32), "seq_lens": np.array([keys + tokens], np.int32)}
            plan = Plan(arrays, {**largest, "sequences": 1}, fills={"cu_seqlens": tokens})
            seconds = runner.replay_seconds(plan)
            assert seconds is not None
            return seconds

        def eager(keys: int) -> float:
            return seconds_of(
                lambda: self._prefill(graphs.caches, [tokens], graphs.state, cached=keys), self._context.device
            )

        # The first runs include allocations and the start of libraries.
        for keys in (0, cached):
            eager(keys)
        pairs = tokens * cached
        each = (max(0.0, run(cached) - run(0)) / pairs for run in (eager, replay))
        return RouteSeconds(*each)

    def _prefill(
        self,
        caches: Sequence[Mapping[str, Tensor]],
        lengths: list[int],
        state: SlotState,
        *,
        cached: int = 0,
        rows: int = 0,
    ) -> None:
        """The decoder over prompts of these lengths, each after `cached` keys, together with `rows` decode rows."""
        sizes, tokens = self._sizes, sum(lengths)
        zeros = np.zeros(tokens, dtype=np.int64)
        arrays = {
            "tokens": zeros,
            "next_tokens": zeros,
            "positions": np.zeros((self._decoder.position_axes, tokens), dtype=np.int64),
            "slots": np.zeros(rows, dtype=np.int64),
        } | scratch_chunks(lengths, cached, sizes.page_size)
        if state.states:
            arrays |= {name: np.zeros(len(lengths), dtype=np.int64) for name in STATE_BUFFERS}
        sent = upload_arrays(arrays, self._context.device)
        ids, positions, batch = packed_rows(sent, state, caches, sizes.max_pages, sizes.page_size)
        width = sizes.hidden_size * (1 + self._decoder.feature_levels)
        run_chunks(self._decoder, with_features(self._decoder.embed(ids), width), positions, batch, sent)
