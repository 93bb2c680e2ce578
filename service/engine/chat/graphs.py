"""The captured graphs of a chat model: a runner for each step, its buckets, which of these are captured before
readiness, and the runs that need no request. These measure memory and costs, and compile the kernels of eager runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, Capturable, Plan
from models.layers.kv_cache import PagedBatch
from models.protocol import Decoder
from service.engine.chat.drafts import MAX_ROWS, Drafting
from service.engine.chat.slot_state import SlotState
from service.engine.chat.steps import (
    STATE_BUFFERS,
    DecodeStep,
    GuidedSampleStep,
    LayersStep,
    PrefillStep,
    SampleStep,
    Sampling,
    VerifyStep,
    chunk_states,
    run_chunks,
    with_features,
)
from service.engine.core.pages import scratch_chunks
from service.engine.core.worker import WARM_SEQUENCES, WARM_TOKENS, WorkerContext
from service.graphs.buckets import captured_first, chosen_buckets, powers_of_two, row_buckets
from service.graphs.buffers import upload_arrays
from service.graphs.runner import GraphRunner

PREFILL_TOKENS = {"cuda": (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024), "cpu": (64,)}
"""Tokens of the captured prefills without cached context. A padded token costs as much as a real one (20 us for 7B
parameters), so the sizes are close together. Every second bucket is captured before readiness."""
PREFILL_SEQUENCES = 8
_TOKENS_PER_SEQUENCE = 16
"""Room for a sequence is a program of each kernel, which takes time even where there is none. Only the largest captured
prefill has room for as many as there are slots."""
CACHED_PREFILL_TOKENS = {
    "cuda": (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048),
    "cpu": (16, 64),
}
"""Tokens of the captured prefills of any chunks. A later turn of a conversation has few tokens; a chunk of a long
prompt takes the whole budget of a step, or what fits between two decode steps."""


def token_buckets(sizes: tuple[int, ...], budget: int, *, whole: bool = False) -> list[int]:
    """The `sizes`, cut to the step's token budget. whole: extended up to the budget, each a quarter larger than the one
    before."""
    made = sorted({min(size, budget) for size in sizes})
    while whole and made[-1] < budget:
        made.append(min(budget, made[-1] * 5 // 4))
    return made


def chunk_buckets(sequences: Mapping[int, int], feature_levels: int) -> tuple[list[Bucket], list[Bucket]]:
    """Buckets of a captured prefill, from the sequences by tokens, and those to capture before readiness. If media rows
    have features, each size has a bucket with them and one without; the former can hold text, too."""
    bucket_list: list[Bucket] = [{"tokens": tokens, "sequences": count} for tokens, count in sequences.items()]
    with_features = bucket_list
    if feature_levels:
        with_features = [{**bucket, "levels": feature_levels} for bucket in bucket_list]
        bucket_list = [*({**bucket, "levels": 0} for bucket in bucket_list), *with_features]
    return bucket_list, with_features[::-1][::2]


_CPU_PAGES = (8, 64)
"""Widths of block tables in the buckets on a CPU, whose attention reads whole tables: short sequences use narrow
ones."""
_MEASURED_CONTEXT = 4096
"""Number of cached keys before a chunk, to measure their cost."""


@dataclass(frozen=True)
class StepSizes:
    """Sizes that the steps of a model share."""

    page_size: int
    max_pages: int
    """Maximum number of pages of one sequence."""
    vocab_limit: int
    """Ids that can be sampled: those that both the tokenizer and the embedding have."""
    drafts: int
    """Drafts of a sequence in a step that has any; 0: none has."""
    history: int
    """Positions of SlotState.history."""


class ChatGraphs:
    """The graph runners of one model.

    decode, verify, sample, guided_sample: one runner for rows without penalties and filters (False), one for rows with
        (True). verify: decode steps with drafts.
    layers, guided_sample: the two halves of a decode step with guided rows; `held_hidden` [slots, hidden_size] passes
        the hidden states from the first to the second.
    prefill, cached_prefill: chunks without cached context, and any chunks.
    """

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        state: SlotState,
        caches: Sequence[Mapping[str, Tensor]],
        sizes: StepSizes,
        context: WorkerContext,
    ) -> None:
        self._name, self.context = name, context
        self.decoder, self.sizes, self.state, self.caches = decoder, sizes, state, caches
        config, dtype = context.config, context.dtype
        self.held_hidden = held = torch.zeros((config.slots, decoder.hidden_size), dtype=dtype, device=context.device)
        rows = chosen_buckets(config.decode_buckets, config.slots) or row_buckets(config.slots)
        sample_buckets: list[Bucket] = [{"rows": count} for count in rows]
        on_cpu, most = context.device.type == "cpu", sizes.max_pages
        widths = sorted({min(width, most) for width in _CPU_PAGES}) if on_cpu else [most]
        decode_buckets: list[Bucket] = [{"rows": count, "pages": pages} for count in rows for pages in widths]
        layers = LayersStep(decoder, state, caches, sizes.page_size)
        drafting = None
        if decoder.drafter is not None:
            drafting = Drafting(decoder, state, caches, sizes.page_size, sizes.vocab_limit)
        samplings = {full: Sampling(decoder, state, sizes.vocab_limit, full, drafting) for full in (False, True)}

        def by_sampling(
            kind: str, step: Callable[[Sampling], Capturable], buckets: list[Bucket], *, guided: bool = False
        ) -> dict[bool, GraphRunner]:
            """With penalties and filters, only powers of two and the largest size are captured before readiness."""
            largest = max((bucket["rows"] for bucket in buckets), default=0)
            few = [bucket for bucket in buckets if bucket["rows"].bit_count() == 1 or bucket["rows"] == largest]
            return {
                full: self._runner(kind, step(sampling), buckets, few if full else buckets, guided=guided)
                for full, sampling in samplings.items()
            }

        verify_buckets: list[Bucket] = [
            {**b, "drafts": sizes.drafts} for b in decode_buckets if sizes.drafts and b["rows"] <= MAX_ROWS
        ]
        self.decode = by_sampling("decode", partial(DecodeStep, layers), decode_buckets)
        self.verify = by_sampling("verify", partial(VerifyStep, layers), verify_buckets)
        self.sample = by_sampling("sample", lambda s: SampleStep(s, dtype), sample_buckets)
        self.layers = self._runner("guided_layers", replace(layers, held_hidden=held), decode_buckets, [], guided=True)
        self.guided_sample = by_sampling(
            "guided_sample", lambda s: GuidedSampleStep(s, held), sample_buckets, guided=True
        )
        budget, device = config.max_step_tokens, "cpu" if on_cpu else "cuda"
        fresh = token_buckets(PREFILL_TOKENS[device], budget)
        cached = token_buckets(CACHED_PREFILL_TOKENS[device], budget, whole=device == "cuda")
        rooms = {size: min(config.slots, max(PREFILL_SEQUENCES, size // _TOKENS_PER_SEQUENCE)) for size in cached}
        self.prefill = self._prefill_runner(layers, dict.fromkeys(fresh, PREFILL_SEQUENCES), cached=False)
        largest = dict.fromkeys(cached[-1:], config.slots)
        self.cached_prefill = self._prefill_runner(layers, rooms | largest, cached=True)

    @property
    def runners(self) -> list[GraphRunner]:
        """Those of every token, for rows without a grammar, come first."""
        guided = [self.layers, *self.guided_sample.values()]
        rows = (*self.decode.values(), *self.verify.values(), *self.sample.values())
        return [*rows, self.prefill, self.cached_prefill, *guided]

    def prefill_for(self, required: Bucket, *, cached_context: bool) -> GraphRunner | None:
        """The captured prefill that holds the chunks and takes the least time; None if none holds them."""
        runners = [self.cached_prefill] if cached_context else [self.prefill, self.cached_prefill]
        captures = {runner: graph.capture for runner in runners if (graph := runner.graph_for(required)) is not None}
        return min(captures, key=lambda runner: captures[runner].seconds or 0.0, default=None)

    def _prefill_runner(self, layers: LayersStep, sequences: Mapping[int, int], *, cached: bool) -> GraphRunner:
        """sequences: by tokens."""
        step = PrefillStep(layers, self.context.dtype, cached)
        bucket_list, before_ready = chunk_buckets(sequences, self.decoder.feature_levels)
        return self._runner("cached_prefill" if cached else "prefill", step, bucket_list, before_ready)

    def _runner(
        self,
        kind: str,
        step: Capturable,
        bucket_list: list[Bucket],
        before_ready: list[Bucket],
        *,
        guided: bool = False,
    ) -> GraphRunner:
        """before_ready: the buckets to capture before readiness; after a restart only the smallest of them. Graphs for
        guided rows are captured while the engine idles, so that they do not delay the start."""
        context = self.context
        return GraphRunner(
            self._name,
            kind,
            step,
            bucket_list,
            context.pool,
            context.observations,
            enabled=context.config.graphs,
            before_ready=[] if guided else captured_first(before_ready, restarted=context.config.restarted),
            # Between guided steps these are the slots of the last one, which a capture must not advance.
            fill_others=self.state.sampled.zero_ if guided else None,
        )

    # Eager runs

    def eager_chunks(self, hidden: Tensor, sent: Mapping[str, Tensor]) -> Tensor:
        """An eager pass over chunks -> hidden [n, hidden_size]. sent: service.engine.chat.runner.chunk_arrays."""
        batch = PagedBatch(
            self.caches,
            self.sizes.page_size,
            sent["slot_mapping"],
            cu_seqlens_q=sent["cu_seqlens_q"],
            cu_seqlens_k=sent["cu_seqlens_k"],
            context_slots=sent.get("context_slots"),
            states=chunk_states(sent, self.state.states),
        )
        return run_chunks(self.decoder, hidden, sent["positions"], batch, sent)

    def _scratch_prefill(self, lengths: list[int], *, cached: int = 0) -> None:
        """The decoder over prompts of these lengths, each after `cached` keys, in the scratch page."""
        decoder, zeros = self.decoder, np.zeros(sum(lengths), dtype=np.int64)
        arrays = {
            "tokens": zeros,
            "next_tokens": zeros,
            "positions": np.zeros((decoder.position_axes, len(zeros)), dtype=np.int64),
        } | scratch_chunks(lengths, cached, self.sizes.page_size)
        if self.state.states:
            arrays |= {name: np.zeros(len(lengths), dtype=np.int64) for name in STATE_BUFFERS}
        sent = upload_arrays(arrays, self.context.device)
        hidden = with_features(decoder.embed(sent["tokens"]), decoder.hidden_size * (1 + decoder.feature_levels))
        self.eager_chunks(hidden, sent)

    def largest_runs(self) -> Iterator[Callable[[], object]]:
        """What takes most memory eagerly: the largest prefill, and steps of all slots."""
        slots, sizes = self.context.config.slots, self.sizes
        tokens = min(self.context.config.max_step_tokens, sizes.max_pages * sizes.page_size)
        yield partial(self._scratch_prefill, [tokens])
        largest = [
            (self.decode[True], {"rows": slots, "pages": sizes.max_pages}),
            (self.guided_sample[True], {"rows": slots}),
        ]
        if sizes.drafts:
            rows = min(slots, MAX_ROWS)
            largest += [(self.verify[True], {"rows": rows, "pages": sizes.max_pages, "drafts": sizes.drafts})]
        # Fewer tokens may take more memory: the kernel splits their keys and keeps partial results (paged_prefill).
        for size in powers_of_two(tokens):
            largest += [(self.cached_prefill, {"tokens": size, "sequences": slots})]
        for runner, bucket in largest:
            yield runner.filler_run(bucket)

    def warm_up(self) -> Iterator[None]:
        """Runs what may run eagerly: decode steps and prefills of each power of two, prefills with cached context and
        of many sequences. Yields after each."""
        config, sizes = self.context.config, self.sizes
        rows = powers_of_two(config.slots)
        for full in (False, True):
            yield from self.decode[full].warm_up({"rows": count, "pages": sizes.max_pages} for count in rows)
            yield from self.verify[full].warm_up(self.verify[full].bucket_list)
            yield from self.sample[full].warm_up({"rows": count} for count in rows)
            yield from self.guided_sample[full].warm_up({"rows": count} for count in rows)
        yield from self.layers.warm_up({"rows": count, "pages": sizes.max_pages} for count in rows)
        passes = [([tokens], 0) for tokens in powers_of_two(min(config.max_step_tokens, WARM_TOKENS))]
        for lengths, cached in (*passes, ([1, 2], sizes.page_size), ([1] * WARM_SEQUENCES, 0)):
            self._scratch_prefill(lengths, cached=cached)
            yield
        yield from self.cached_prefill.warm_up(self.cached_prefill.bucket_list[:1])

    def pair_seconds(self) -> float:
        """Seconds of a pair of a query and a cached key, measured with the largest captured prefill; 0 if none is
        captured or the context has no room for cached keys."""
        runner = self.cached_prefill
        largest = max(runner.captured, key=lambda bucket: bucket["tokens"], default=None)
        if largest is None:
            return 0.0
        tokens = largest["tokens"]
        cached = min(_MEASURED_CONTEXT, self.sizes.max_pages * self.sizes.page_size - tokens)
        if cached <= 0:
            return 0.0

        def replay(keys: int) -> float:
            arrays = {"cu_seqlens": np.array([0, tokens], np.int32), "seq_lens": np.array([keys + tokens], np.int32)}
            plan = Plan(arrays, {**largest, "sequences": 1}, fills={"cu_seqlens": tokens})
            seconds = runner.replay_seconds(plan)
            assert seconds is not None
            return seconds

        return max(0.0, replay(cached) - replay(0)) / (tokens * cached)
