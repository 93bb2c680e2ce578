"""The captured graphs of a chat model: a runner for each step, its buckets, and which of these are captured before
readiness."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, Capturable
from models.protocol import Decoder
from service.engine.chat.drafts import MAX_ROWS, Drafting
from service.engine.chat.replay_choice import (
    CACHED_PREFILL_TOKENS,
    PREFILL_SEQUENCES,
    PREFILL_TOKENS,
    chunk_buckets,
    token_buckets,
)
from service.engine.chat.slot_state import SlotState
from service.engine.chat.steps import (
    CachedPrefillStep,
    DecodeStep,
    GuidedLayersStep,
    GuidedSampleStep,
    LayersStep,
    PrefillStep,
    SampleStep,
    Sampling,
    VerifyStep,
)
from service.engine.core.worker import WorkerContext
from service.graphs.buckets import captured_first, chosen_buckets, row_buckets
from service.graphs.runner import GraphRunner

_CPU_PAGES = (8, 64)
"""Widths of block tables in the buckets on a CPU, whose attention reads whole tables: short sequences use narrow
ones."""


@dataclass(frozen=True)
class StepSizes:
    """Sizes that the steps of a model share."""

    page_size: int
    max_pages: int
    """Maximum number of pages of one sequence."""
    hidden_size: int
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
        self._name, self._context = name, context
        self._decoder, self._sizes, self.state, self.caches = decoder, sizes, state, caches
        config, hidden_size, dtype = context.config, sizes.hidden_size, context.dtype
        self.held_hidden = held = torch.zeros((config.slots, hidden_size), dtype=dtype, device=context.device)
        rows = chosen_buckets(config.decode_buckets, config.slots) or row_buckets(config.slots)
        sample_buckets: list[Bucket] = [{"rows": count} for count in rows]
        decode_buckets = self._decode_buckets(rows)
        layers = LayersStep(decoder, state, caches, sizes.page_size)
        drafting = None
        if decoder.drafter is not None:
            drafting = Drafting(decoder, state, caches, sizes.page_size, sizes.vocab_limit)
        samplings = {full: Sampling(decoder, state, sizes.vocab_limit, full, drafting) for full in (False, True)}
        self.decode = {
            full: self._row_runner("decode", DecodeStep(layers, sampling), decode_buckets, full=full)
            for full, sampling in samplings.items()
        }
        verify_buckets: list[Bucket] = [
            {**b, "drafts": sizes.drafts} for b in decode_buckets if sizes.drafts and b["rows"] <= MAX_ROWS
        ]
        self.verify = {
            full: self._row_runner("verify", VerifyStep(layers, sampling), verify_buckets, full=full)
            for full, sampling in samplings.items()
        }
        self.sample = {
            full: self._row_runner("sample", SampleStep(sampling, hidden_size, dtype), sample_buckets, full=full)
            for full, sampling in samplings.items()
        }
        self.layers = self._row_runner("guided_layers", GuidedLayersStep(layers, held), decode_buckets, guided=True)
        self.guided_sample = {
            full: self._row_runner(
                "guided_sample", GuidedSampleStep(state, sampling, held), sample_buckets, full=full, guided=True
            )
            for full, sampling in samplings.items()
        }
        self.prefill, self.cached_prefill = self._prefill_runners()

    @property
    def runners(self) -> list[GraphRunner]:
        """Those of every token, for rows without a grammar, come first."""
        guided = [self.layers, *self.guided_sample.values()]
        rows = (*self.decode.values(), *self.verify.values(), *self.sample.values())
        return [*rows, self.prefill, self.cached_prefill, *guided]

    def _prefill_runners(self) -> tuple[GraphRunner, GraphRunner]:
        """Runners for chunks without cached context, and for any chunks."""
        context, kind = self._context, self._context.device.type
        shape = (self._sizes.page_size, self._sizes.hidden_size, context.dtype)
        budget, sequences = context.config.max_step_tokens, context.config.slots
        fresh = token_buckets(PREFILL_TOKENS[kind], budget)
        cached = token_buckets(CACHED_PREFILL_TOKENS[kind], budget, whole=kind == "cuda")
        return (
            self._chunk_runner(
                PrefillStep(self._decoder, self.caches, *shape, self.state.states), fresh, PREFILL_SEQUENCES
            ),
            self._chunk_runner(CachedPrefillStep(self._decoder, self.state, self.caches, *shape), cached, sequences),
        )

    def _chunk_runner(self, step: PrefillStep | CachedPrefillStep, sizes: list[int], sequences: int) -> GraphRunner:
        bucket_list, before_ready = chunk_buckets(sizes, sequences, self._decoder.feature_levels)
        return self._runner(step.name, step, bucket_list, before_ready)

    def _decode_buckets(self, rows: list[int]) -> list[Bucket]:
        """Every number of rows, with each width of block tables."""
        on_cpu = self._context.device.type == "cpu"
        most = self._sizes.max_pages
        widths = sorted({min(width, most) for width in _CPU_PAGES}) if on_cpu else [most]
        return [{"rows": count, "pages": pages} for count in rows for pages in widths]

    def _row_runner(
        self,
        kind: str,
        step: DecodeStep | VerifyStep | GuidedLayersStep | SampleStep | GuidedSampleStep,
        bucket_list: list[Bucket],
        *,
        full: bool = False,
        guided: bool = False,
    ) -> GraphRunner:
        """A runner of steps by rows. Before readiness it captures every size for plain sampling, but only powers of two
        and the largest size for penalties and filters. The graphs for guided rows are captured while the engine idles,
        so that they do not delay the start."""
        largest = max((bucket["rows"] for bucket in bucket_list), default=0)
        before_ready = [
            bucket for bucket in bucket_list if not full or bucket["rows"].bit_count() == 1 or bucket["rows"] == largest
        ]
        if guided:
            before_ready = []
        # Between guided steps these are the slots of the last one, which a capture must not advance.
        fill_others = self.state.sampled.zero_ if guided else None
        return self._runner(kind, step, bucket_list, before_ready, fill_others)

    def _runner(
        self,
        kind: str,
        step: Capturable,
        bucket_list: list[Bucket],
        before_ready: list[Bucket],
        fill_others: Callable[[], object] | None = None,
    ) -> GraphRunner:
        """before_ready: the buckets to capture before readiness; after a restart only the smallest of them."""
        context = self._context
        return GraphRunner(
            self._name,
            kind,
            step,
            bucket_list,
            context.pool,
            context.observations,
            enabled=context.config.graphs,
            before_ready=captured_first(before_ready, restarted=context.config.restarted),
            fill_others=fill_others,
        )
