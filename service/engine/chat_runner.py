"""The device side of a chat model: caches, slot state, recorded steps and the eager mixed step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from models.layers.kv_cache import PagedBatch
from models.protocol import Capacity, ChatModel, Plan
from service.engine.chat_plans import admission_arrays, chunk_arrays, cu_seqlens, prefill_needs
from service.engine.decode_step import DecodeStep, PrefillStep, SampleStep, Sampling, decode_rows
from service.engine.faults import prefill_errors
from service.engine.memory import peak_bytes
from service.engine.sampler import log_probabilities
from service.engine.scheduler import Chunk, Grant, Step
from service.engine.sequence import Sequence
from service.engine.slot_state import SlotState
from service.engine.worker import WARM_SEQUENCES, WARM_TOKENS, MemoryNeeds, WorkerContext
from service.graphs.accounting import Route
from service.graphs.buckets import octaves, row_ladder
from service.graphs.buffers import upload
from service.graphs.runner import GraphRunner

_CPU_PAGES = (8, 64)
"""Block table widths of the CPU's buckets: its attention reads whole tables, so short sequences get narrow ones."""

_PREFILL_TOKENS = {"cuda": (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024), "cpu": (64,)}
"""Rungs of recorded prefills: where launches, and not the GPU, bound an eager one. A padded token costs what a token
costs (20 us for 7B parameters), so they are close; every other one is recorded before readiness."""
_PREFILL_SEQUENCES = 8

Embeds = Callable[[Sequence, int], Tensor]
"""Embeddings [num_embeds, width] of a sequence's item."""
PrefillKind = Literal["mixed", "prefill"]


@dataclass(frozen=True)
class Launched:
    """results int32 [rows, 2], rows in the order of the step's decode rows and then its last chunks; with
    `logprobs`, `top_values` [rows, n] and `top_ids` where a row asked for them."""

    results: dict[str, Tensor]
    route: Route
    kind: Literal["decode", "mixed", "prefill"]


class ChatRunner:
    def __init__(self, name: str, model: ChatModel, vocab_limit: int, max_context: int, context: WorkerContext) -> None:
        self._name = name
        self._decoder = model.decoder
        self._vocab_limit = min(vocab_limit, model.decoder.vocab_size)
        self._context = context
        self._page_size = context.config.page_size
        self._max_pages = -(-max_context // self._page_size)
        self._width = int(model.decoder.embed(torch.zeros(1, dtype=torch.int64, device=context.device)).shape[-1])

    @property
    def page_bytes(self) -> int:
        per_token = sum(spec.bytes_per_token(self._context.dtype) for spec in self._decoder.cache_specs())
        return per_token * self._page_size

    @property
    def width(self) -> int:
        return self._width

    def allocate(self, num_pages: int) -> None:
        config, device = self._context.config, self._context.device
        self._caches = [
            spec.allocate(num_pages, self._page_size, device, self._context.dtype)
            for spec in self._decoder.cache_specs()
        ]
        self._state = SlotState(config.max_running, self._max_pages, self._vocab_limit, device)
        sizes = sorted(set(config.decode_buckets)) or row_ladder(config.max_running)
        self._decode = {full: self._decode_runner(sizes, full=full) for full in (False, True)}
        self._sample = {full: self._sample_runner(sizes, full=full) for full in (False, True)}
        self._prefill = self._prefill_runner()

    def _prefill_runner(self) -> GraphRunner:
        context = self._context
        step = PrefillStep(self._decoder, self._caches, self._page_size, self._width, context.dtype)
        most = context.config.max_step_tokens
        sizes = sorted({min(tokens, most) for tokens in _PREFILL_TOKENS[context.device.type]})
        ladder: list[Capacity] = [{"tokens": tokens, "sequences": _PREFILL_SEQUENCES} for tokens in sizes]
        return GraphRunner(
            self._name,
            "prefill",
            step,
            ladder,
            context.pool,
            context.observations,
            enabled=context.config.graphs,
            hot=ladder[::-1][::2],
        )

    def _decode_runner(self, sizes: list[int], *, full: bool) -> GraphRunner:
        sampling = Sampling(self._decoder, self._state, self._vocab_limit, full=full)
        step = DecodeStep(self._decoder, self._state, self._caches, self._page_size, sampling)
        on_cpu = self._context.device.type == "cpu"
        widths = sorted({min(width, self._max_pages) for width in _CPU_PAGES}) if on_cpu else [self._max_pages]
        ladder: list[Capacity] = [{"rows": rows, "pages": pages} for rows in sizes for pages in widths]
        return self._runner("decode", step, ladder, full=full)

    def _sample_runner(self, sizes: list[int], *, full: bool) -> GraphRunner:
        sampling = Sampling(self._decoder, self._state, self._vocab_limit, full=full)
        step = SampleStep(sampling, self._width, self._context.dtype)
        return self._runner("sample", step, [{"rows": rows} for rows in sizes], full=full)

    def _runner(self, kind: str, step: DecodeStep | SampleStep, ladder: list[Capacity], *, full: bool) -> GraphRunner:
        """Before readiness: plain steps of every size, full ones at powers of two and the largest."""
        largest = max(capacity["rows"] for capacity in ladder)
        hot = [c for c in ladder if not full or c["rows"].bit_count() == 1 or c["rows"] == largest]
        return GraphRunner(
            self._name,
            kind,
            step,
            ladder,
            self._context.pool,
            self._context.observations,
            enabled=self._context.config.graphs,
            hot=hot,
        )

    @property
    def graph_runners(self) -> list[GraphRunner]:
        return [*self._decode.values(), *self._sample.values(), self._prefill]

    def measure(self) -> MemoryNeeds:
        """Peak of a prefill of the whole token budget and of a decode step of all slots, over scratch pages."""
        device, config = self._context.device, self._context.config
        if device.type != "cuda":
            return MemoryNeeds()
        caches = [
            spec.allocate(1, self._page_size, device, self._context.dtype) for spec in self._decoder.cache_specs()
        ]
        tokens = min(config.max_step_tokens, self._max_pages * self._page_size)
        prefill = peak_bytes(lambda: self._scratch_pass(caches, [tokens]), device)
        state = SlotState(config.max_running, self._max_pages, self._vocab_limit, device)
        sampling = Sampling(self._decoder, state, self._vocab_limit, full=True)
        step = DecodeStep(self._decoder, state, caches, self._page_size, sampling)
        slots = torch.zeros(config.max_running, dtype=torch.int64, device=device)
        capacity = {"rows": config.max_running, "pages": self._max_pages}
        decode = peak_bytes(lambda: step.forward({"slots": slots}, capacity), device)
        num_bytes = SlotState.num_bytes(config.max_running, self._max_pages, self._vocab_limit)
        return MemoryNeeds(workspace=max(prefill, decode), graphs=max(prefill, decode), state=num_bytes)

    def warm_up(self) -> None:
        """What may run eagerly, on the scratch slot and page: steps and prefills of each octave, prefills with a past,
        of many sequences and beside decode rows."""
        config = self._context.config
        rows = octaves(config.max_running)
        for full in (False, True):
            self._decode[full].warm_up({"rows": count, "pages": self._max_pages} for count in rows)
            self._sample[full].warm_up({"rows": count} for count in rows)
        for tokens in octaves(min(config.max_step_tokens, WARM_TOKENS)):
            self._scratch_pass(self._caches, [tokens])
        self._scratch_pass(self._caches, [1, 2], past=self._page_size)
        self._scratch_pass(self._caches, [1] * WARM_SEQUENCES)
        for count in rows:
            self._scratch_pass(self._caches, [1], rows=count)

    def _scratch_pass(
        self, caches: list[dict[str, Tensor]], lengths: list[int], *, past: int = 0, rows: int = 0
    ) -> None:
        """The backbone over prompts of these lengths, each behind `past` keys, and over decode rows beside them."""
        sizes = np.array(lengths)
        tokens = rows + int(sizes.sum())
        arrays = {
            "cache_rows": np.zeros(tokens, dtype=np.int64),
            "cu_seqlens_q": cu_seqlens(sizes),
            "cu_seqlens_k": cu_seqlens(sizes + past),
            "slots": np.zeros(rows, dtype=np.int64),
        }
        if past:
            arrays["key_rows"] = np.zeros(int((sizes + past).sum()), dtype=np.int64)
        sent = upload(arrays, self._context.device)
        tables = seq_lens = None
        if rows:
            *_, tables, seq_lens = decode_rows(sent["slots"], self._state, self._max_pages, self._page_size)
        batch = PagedBatch(
            caches=caches,
            page_size=self._page_size,
            slot_mapping=sent["cache_rows"],
            num_decode_rows=rows,
            block_tables=tables,
            seq_lens=seq_lens,
            cu_seqlens_q=sent["cu_seqlens_q"],
            cu_seqlens_k=sent["cu_seqlens_k"],
            key_rows=sent.get("key_rows"),
            max_seqlen_q=max(lengths),
            max_seqlen_k=max(lengths) + past,
        )
        zeros = torch.zeros(tokens, dtype=torch.int64, device=self._context.device)
        self._decoder.forward(self._decoder.embed(zeros), zeros.expand(self._decoder.position_axes, -1), batch)

    def launch(self, step: Step, embeds: Embeds) -> Launched:
        """Runs one batch.

        Decode rows alone are replayed, and so are prefills without a past that a recording holds: a mixed batch of the
        two is two replays. What else is mixed runs eagerly, with replayed sampling.

        Raises PrefillError when the chunks failed and the decode rows are as they were. After any other error rows may
        have advanced on the device, and their tokens are lost.
        """
        if step.grants:
            self._write_grants(step.grants)
        if not step.chunks:
            return self._decode_rows(step)
        kind: PrefillKind = "mixed" if len(step.slots) else "prefill"
        replayed = self._prefill.bucket_for(prefill_needs(step.chunks)) is not None and not any(
            chunk.start for chunk in step.chunks
        )
        if replayed and len(step.slots) and step.logprobs is None:
            # Prefills first: where one fails, the decode rows have not advanced.
            alone = replace(step, slots=step.slots[:0], sequences=(), grants=())
            with prefill_errors():
                prefilled = self._prefill_rows(alone, embeds, kind, replayed=True)
            decoded = self._decode_rows(step)
            parts = [part.results["results"] for part in (decoded, prefilled) if part.results]
            return Launched({"results": torch.cat(parts)}, decoded.route, kind)
        return self._prefill_rows(step, embeds, kind, replayed=replayed and not len(step.slots))

    def _decode_rows(self, step: Step) -> Launched:
        needs = {"rows": len(step.slots), "pages": self._table_width(step)}
        run = self._decode[step.full].run(Plan(arrays={"slots": step.slots}, needs=needs))
        return Launched(self._results(run.outputs, len(step.slots), step.logprobs), run.route, "decode")

    def _table_width(self, step: Step) -> int:
        """Pages per row of the block tables. A GPU reads no more than a row's length; one width is one kernel."""
        return self._max_pages if self._context.device.type == "cuda" else step.num_pages

    def _prefill_rows(self, step: Step, embeds: Embeds, kind: PrefillKind, *, replayed: bool) -> Launched:
        route: Route = "replay" if replayed else "eager"
        if not replayed:
            self._context.observations.count_eager_step(kind, model=self._name, kind=kind)
        with prefill_errors():
            hidden = self._backbone(step, embeds, replayed=replayed)
        ends = [chunk.sequence.slot for chunk in step.chunks if chunk.is_last]
        slots = np.concatenate((step.slots, np.array(ends, dtype=np.int64)))
        if not len(slots):
            return Launched({}, route, kind)
        plan = Plan(arrays={"slots": slots}, tensors={"hidden": [hidden]}, needs={"rows": len(slots)})
        run = self._sample[step.full].run(plan)
        return Launched(self._results(run.outputs, len(slots), step.logprobs), route, kind)

    def _results(self, outputs: Mapping[str, Tensor], rows: int, logprobs: int | None) -> dict[str, Tensor]:
        results = {"results": outputs["results"][:rows]}
        if logprobs is not None:
            tokens = results["results"][:, 0].long()
            names = ("logprobs", "top_values", "top_ids")
            values = log_probabilities(outputs["logits"][:rows], tokens, logprobs)
            results |= dict(zip(names, values, strict=True))
        return results

    def _write_grants(self, grants: tuple[Grant, ...]) -> None:
        rows = np.array([(grant.slot, grant.index, grant.page) for grant in grants], dtype=np.int64).T
        block = upload({"rows": rows}, self._context.device)["rows"]
        self._state.block_tables.index_put_((block[0], block[1]), block[2].to(torch.int32))

    def _backbone(self, step: Step, embeds: Embeds, *, replayed: bool) -> Tensor:
        """Decoder over decode rows and chunks -> hidden [decode rows + last chunks, width]. One upload."""
        ends = [chunk for chunk in step.chunks if chunk.is_last]
        arrays = chunk_arrays(step.chunks, len(step.slots), self._page_size) | {"slots": step.slots}
        if ends:
            arrays |= admission_arrays([chunk.sequence for chunk in ends], self._max_pages, self._vocab_limit)
        sent = upload(arrays, self._context.device)
        tokens, positions, cache_rows = sent["tokens"], sent["positions"], sent["cache_rows"]
        tables = seq_lens = None
        if len(step.slots):
            decode_tokens, decode_positions, decode_cache_rows, tables, seq_lens = decode_rows(
                sent["slots"], self._state, self._table_width(step), self._page_size
            )
            tokens = torch.cat((decode_tokens, tokens))
            positions = torch.cat((decode_positions.expand(positions.shape[0], -1), positions), dim=1)
            cache_rows = torch.cat((decode_cache_rows, cache_rows))
        if ends:
            self._admit(sent)
        hidden = self._decoder.embed(tokens)
        if "media_rows" in sent:
            hidden = hidden.index_copy(0, sent["media_rows"], self._media(step.chunks, embeds).to(hidden.dtype))
        if replayed:
            plan = Plan(
                arrays={"cu_seqlens": arrays["cu_seqlens_q"]},
                tensors={"hidden": [hidden], "positions": [positions.T], "cache_rows": [cache_rows]},
                fills={"cu_seqlens": len(tokens)},
                needs=prefill_needs(step.chunks),
            )
            return self._prefill.run(plan).outputs["hidden"][sent["sampled_rows"]]
        batch = PagedBatch(
            caches=self._caches,
            page_size=self._page_size,
            slot_mapping=cache_rows,
            num_decode_rows=len(step.slots),
            block_tables=tables,
            seq_lens=seq_lens,
            cu_seqlens_q=sent["cu_seqlens_q"],
            cu_seqlens_k=sent["cu_seqlens_k"],
            key_rows=sent.get("key_rows"),
            max_seqlen_q=max(chunk.length for chunk in step.chunks),
            max_seqlen_k=max(chunk.end for chunk in step.chunks),
        )
        return self._decoder.forward(hidden, positions, batch)[sent["sampled_rows"]]

    def _media(self, chunks: tuple[Chunk, ...], embeds: Embeds) -> Tensor:
        return torch.cat(
            [
                embeds(chunk.sequence, rows.item)[rows.offset : rows.offset + rows.length]
                for chunk in chunks
                for rows in chunk.sequence.media_rows(chunk.start, chunk.end)
            ]
        )

    def _admit(self, sent: Mapping[str, Tensor]) -> None:
        """Writes the slot-state rows of sequences whose prefill ends in this step."""
        state, slots = self._state, sent["new_slots"]
        for name in ("ints", "floats", "stop_ids", "block_tables", "bias_ids", "bias_values"):
            getattr(state, name).index_copy_(0, slots, sent[f"new_{name}"])
        if "full_slots" in sent:
            state.prompt_seen[sent["full_slots"]] = False
            state.output_counts[sent["full_slots"]] = 0
            state.prompt_seen.index_put_((sent["prompt_slots"], sent["prompt_ids"]), state.prompt_seen.new_ones(()))
            ones = state.output_counts.new_ones(sent["output_slots"].shape)
            state.output_counts.index_put_((sent["output_slots"], sent["output_ids"]), ones, accumulate=True)
