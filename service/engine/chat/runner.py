"""The device side of a chat model: caches, slot state, captured steps and eager prefills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, Plan
from models.protocol import ChatModel
from service.engine.chat.graphs import ChatGraphs, StepSizes
from service.engine.chat.guided.guidance import MaskJob, MaskTable
from service.engine.chat.pacing import Pacing
from service.engine.chat.sampler import log_probabilities
from service.engine.chat.sequence import BlockAllocation, ChatSequence, Chunk, SamplerNeeds, Step
from service.engine.chat.slot_state import SAMPLED_INTS, IntColumn, SlotState, allocate_layers, row_bytes
from service.engine.chat.steps import STATE_BUFFERS, with_features
from service.engine.core.faults import RepeatableLaunchError, launch_errors, with_second_try
from service.engine.core.pages import block_tables, packed_chunks, pages_for
from service.engine.core.worker import MemoryRequirements, WorkerContext
from service.engine.memory import peak_bytes
from service.graphs.buffers import upload_arrays
from service.graphs.observations import Route
from service.graphs.runner import GraphRunner
from service.link.sampling import MAX_BIASES, MAX_STOP_IDS, FloatColumn

# Host arrays of a step, made from scheduled chunks and sequences, to be uploaded.


def required_prefill(chunks: tuple[Chunk, ...], feature_levels: int) -> Bucket:
    """The smallest bucket that holds the chunks, for PrefillStep (service.engine.chat.steps)."""
    required = {"tokens": sum(chunk.length for chunk in chunks), "sequences": len(chunks)}
    if not feature_levels:
        return required
    media = any(True for chunk in chunks for _ in chunk.sequence.media_rows(chunk.start, chunk.end))
    return required | {"levels": feature_levels if media else 0}


def chunk_arrays(chunks: tuple[Chunk, ...], page_size: int, max_pages: int) -> dict[str, np.ndarray]:
    """Chunks packed one behind the other; n is the number of their tokens.

    tokens int64 [n], positions int64 [axes, n], and packed_chunks; chunk_slots int64 [chunks] and their block_tables
    int32 [chunks, max_pages]. last_rows int64: the rows where prompts end. media_rows int64, only where positions take
    embeddings of media; mark_rows int64, only where there are marks. For models with recurrent state also state_arrays.
    """
    lengths = np.array([chunk.length for chunk in chunks])
    starts = np.cumsum(lengths) - lengths
    lasts = [start + chunk.length - 1 for start, chunk in zip(starts, chunks, strict=True) if chunk.is_last]
    arrays = {
        "tokens": np.concatenate([chunk.sequence.token_ids(chunk.start, chunk.end) for chunk in chunks]),
        "positions": np.concatenate([c.sequence.positions(c.start, c.end) for c in chunks], axis=1),
        "chunk_slots": np.array([chunk.sequence.slot for chunk in chunks], dtype=np.int64),
        "block_tables": block_tables([chunk.sequence.pages for chunk in chunks], max_pages),
        "last_rows": np.array(lasts, dtype=np.int64),
    } | packed_chunks([(chunk.sequence.pages, chunk.start, chunk.end) for chunk in chunks], page_size)
    media = [
        np.arange(rows.start, rows.end) - chunk.start + start
        for start, chunk in zip(starts, chunks, strict=True)
        for rows in chunk.sequence.media_rows(chunk.start, chunk.end)
    ]
    if media:
        arrays["media_rows"] = np.concatenate(media)
    marks = [
        chunk.sequence.prompt.marks[chunk.sequence.marks(chunk.start, chunk.end)] - chunk.start + start
        for start, chunk in zip(starts, chunks, strict=True)
        if chunk.sequence.prompt.marks is not None
    ]
    if any(map(len, marks)):
        arrays["mark_rows"] = np.concatenate(marks)
    if chunks[0].sequence.state_rows:
        arrays |= state_arrays(chunks)
    return arrays


def next_tokens(chunks: tuple[Chunk, ...]) -> np.ndarray:
    """For each token of the chunks the id of the next one, int64 [n]: 0 if that is not known, -1 where it takes an
    embedding of media."""
    parts = []
    for chunk in chunks:
        sequence, start, end = chunk.sequence, chunk.start + 1, chunk.end + 1
        ids = sequence.token_ids(start, end)
        for rows in sequence.media_rows(start, end):
            ids[rows.start - start : rows.end - start] = -1
        parts += [ids, np.zeros(chunk.length - len(ids), np.int64)]
    return np.concatenate(parts)


def state_arrays(chunks: tuple[Chunk, ...]) -> dict[str, np.ndarray]:
    """The rows of recurrent state that chunks read and write, as the fields of StateRows, each int64 [chunks]."""
    rows = [
        (s.state_read, s.state_rows[1], s.snapshot_row, max(0, chunk.snapshot_end - chunk.start))
        for chunk in chunks
        for s in (chunk.sequence,)
    ]
    return dict(zip(STATE_BUFFERS, np.array(rows, dtype=np.int64).T, strict=True))


def admission_arrays(sequences: list[ChatSequence], vocab_size: int) -> dict[str, np.ndarray]:
    """Rows of the slot state, by name, for sequences whose prefill ends in this step: the state of a decode step just
    before it samples the first token.

    vocab_size: larger ids cannot be sampled, and the tables of penalties have no column for them.
    """
    count = len(sequences)
    ints = np.zeros((count, len(IntColumn)), dtype=np.int64)
    floats = np.zeros((count, len(FloatColumn)), dtype=np.float32)
    stop_ids = np.full((count, MAX_STOP_IDS), -1, dtype=np.int64)
    bias_ids = np.zeros((count, MAX_BIASES), dtype=np.int64)
    bias_values = np.zeros((count, MAX_BIASES), dtype=np.float32)
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        ints[row], floats[row] = _int_row(sequence), sampling.floats()
        stops = [token for token in sampling.stop_token_ids if token < vocab_size]
        stop_ids[row, : len(stops)] = stops
        bias_ids[row, : len(sampling.logit_bias)] = list(sampling.logit_bias)
        bias_values[row, : len(sampling.logit_bias)] = list(sampling.logit_bias.values())
    arrays: dict[str, np.ndarray] = {
        "new_slots": np.array([sequence.slot for sequence in sequences], dtype=np.int64),
        "new_ints": ints,
        "new_floats": floats,
        "new_stop_ids": stop_ids,
        "new_bias_ids": bias_ids,
        "new_bias_values": bias_values,
    }
    full = [sequence for sequence in sequences if sequence.needs_penalties_or_filters]
    return arrays | (_penalty_arrays(full, vocab_size) if full else {})


def history_arrays(sequences: list[ChatSequence]) -> dict[str, np.ndarray]:
    """Entries of SlotState.history of newly admitted sequences: slots, positions and tokens, int64 [known tokens]."""
    lengths = [sequence.num_tokens for sequence in sequences]
    return {
        "history_slots": np.repeat([sequence.slot for sequence in sequences], lengths),
        "history_places": np.concatenate([np.arange(length) for length in lengths]),
        "history_ids": np.concatenate([sequence.token_ids(0, sequence.num_tokens) for sequence in sequences]),
    }


def _int_row(sequence: ChatSequence) -> np.ndarray:
    """A row of SlotState.ints."""
    sampling, row = sequence.sampling, np.zeros(len(IntColumn), dtype=np.int64)
    row[IntColumn.LENGTH] = sequence.num_tokens - 1
    row[IntColumn.POSITION] = sequence.prompt.next_position + len(sequence.generated) - 1
    row[IntColumn.GENERATED] = len(sequence.generated)
    row[IntColumn.ACTIVE] = 1
    row[IntColumn.SEED] = (sampling.seed + 2**63) % 2**64 - 2**63  # any integer, wrapped to 64 bits
    row[IntColumn.STATED] = sequence.num_tokens
    row[IntColumn.LIMIT] = sequence.max_new_tokens
    for column in SAMPLED_INTS:
        row[column] = getattr(sampling, column.name.lower())
    if sequence.state_rows:  # The last chunk, with which this is sent, writes the second of them.
        row[IntColumn.SPARE], row[IntColumn.STATE] = sequence.state_rows
    return row


def _penalty_arrays(sequences: list[ChatSequence], vocab_size: int) -> dict[str, np.ndarray]:
    """Slots and ids, int64, of the distinct tokens of the prompts and of all tokens of the outputs so far."""
    prompts = [np.unique(s.prompt.token_ids[s.prompt.token_ids < vocab_size]).astype(np.int64) for s in sequences]
    outputs = [np.array(sequence.generated, dtype=np.int64) for sequence in sequences]
    slots = np.array([sequence.slot for sequence in sequences], dtype=np.int64)
    return {
        "full_slots": slots,
        "prompt_slots": np.repeat(slots, [len(ids) for ids in prompts]),
        "prompt_ids": np.concatenate(prompts),
        "output_slots": np.repeat(slots, [len(ids) for ids in outputs]),
        "output_ids": np.concatenate(outputs),
    }


Embeds = Callable[[ChatSequence, int], Tensor]
"""The encoder's rows [num_embeds, embeds_width] of a sequence's item."""
StepKind = Literal["decode", "verify", "prefill"]


@dataclass(frozen=True, eq=False)
class PendingSampling:
    """The sampling of a held step, which waits for the masks of its rows. Until it is launched, no other step of the
    model may be, since that would overwrite the hidden states (LayersStep). An encoder pass may be launched: its
    graphs have their own outputs, and it touches no slot state."""

    slots: np.ndarray
    """Request slots of the rows, int64 [rows]."""
    needs: SamplerNeeds


@dataclass(frozen=True)
class StepOutput:
    """What ChatRunner.launch returns. The step may not have run yet."""

    results: dict[str, Tensor]
    """`results` int32 [rows, 2] as of Sampling, of the decode rows or of the last chunks; with drafts as of VerifyStep.
    Where a row asked for them, also `logprobs` float32 [rows], `top_values` float32 and `top_ids` int64 [rows, n]. Of
    chunks also `hidden` float32 [rows, hidden_size], where it was asked for, and `classes` int64 [marks], the most
    likely class of each of their marks, if there are any."""
    route: Route
    kind: StepKind
    pending_sampling: PendingSampling | None = None
    """Set if a row is guided. Then `results` is empty, and ChatRunner.sample returns them."""


class ChatRunner:
    """Launches the steps that the scheduler made. Everything runs in order on the engine's stream."""

    def __init__(self, name: str, model: ChatModel, vocab_limit: int, max_context: int, context: WorkerContext) -> None:
        self._name = name
        self._decoder = model.decoder
        self._context = context
        page_size = context.config.page_size
        lookup, drafter = context.config.drafts == "lookup", model.decoder.drafter is not None
        self.drafts = context.config.draft_tokens if lookup or drafter else 0
        """Drafts of each row in a step that has any; 0: no step has."""
        self.keys_ahead = max(0, self.drafts - 1) if drafter else 0
        """Positions behind the keys of a step to which its drafter writes."""
        max_pages = pages_for(max_context + self.drafts, page_size)
        history = (max_pages + 1) * page_size if lookup else 0
        self._sizes = StepSizes(page_size, max_pages, vocab_limit, self.drafts, history)
        self.embeds_width = model.decoder.hidden_size * (1 + model.decoder.feature_levels)
        """Width of the encoder's rows: an embedding followed by its features (Decoder.feature_levels)."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers together."""
        per_token = sum(spec.bytes_per_token(self._context.dtype) for spec in self._decoder.cache_specs())
        return per_token * self._sizes.page_size

    def allocate(self, num_pages: int, masks: np.ndarray, state_rows: int) -> None:
        """Allocates the caches, the slot state and the recurrent state. masks: int32 [slots, words], where mask servers
        write."""
        self.graphs = self._make_graphs(num_pages, state_rows)
        self._state = self.graphs.state
        self._masks = MaskTable(self._state, masks)

    def _make_graphs(self, num_pages: int, state_rows: int) -> ChatGraphs:
        """The graphs' runners, over new caches, slot state and recurrent state."""
        config, device, sizes = self._context.config, self._context.device, self._sizes
        caches = [
            spec.allocate(num_pages, sizes.page_size, device, self._context.dtype)
            for spec in self._decoder.cache_specs()
        ]
        states = allocate_layers(self._decoder.state_specs(), state_rows, device)
        inputs = self._decoder.pending_specs(1 + self.drafts) if self.drafts else []
        pending = allocate_layers(inputs, config.slots + 1, device)
        state = SlotState(
            config.slots, sizes.max_pages, sizes.vocab_limit, device, states, pending, sizes.drafts, sizes.history
        )
        return ChatGraphs(self._name, self._decoder, state, caches, sizes, self._context)

    def measure(self, state_rows: int) -> MemoryRequirements:
        """Of steps over caches of one page and one row of recurrent state, of which there will be `state_rows`."""
        device = self._context.device
        if device.type == "cpu":
            return MemoryRequirements()
        graphs = self._make_graphs(num_pages=1, state_rows=1)
        num_bytes = graphs.state.num_bytes + graphs.held_hidden.nbytes
        num_bytes += state_rows * row_bytes(self._decoder.state_specs())
        return MemoryRequirements(max(peak_bytes(run, device) for run in graphs.largest_runs()), num_bytes)

    @property
    def prefill_sizes(self) -> tuple[int, ...]:
        """Tokens of the captured prefills that any chunks may take, ascending."""
        return tuple(sorted({bucket["tokens"] for bucket in self.graphs.cached_prefill.captured}))

    def calibrate(self, pacing: Pacing, encoder: GraphRunner) -> None:
        """Starts `pacing` from what the captures measured, and from what cached keys cost."""
        runners = {"decode": self.graphs.decode[False], "verify": self.graphs.verify[False], "encoder": encoder}
        pacing.start(runners, self.graphs.cached_prefill, self.graphs.pair_seconds())

    def launch(self, step: Step, embeds: Embeds) -> StepOutput:
        """Launches one step. embeds: the encoder outputs of an item of a sequence.

        Chunks that run out of memory have a second try, since all that they write can be written again. Where decode
        rows fail, they may have advanced on the device, and their tokens are lost.
        """
        if not step.chunks:
            return self._launch_decode(step)
        launch = partial(self._launch_prefill, step, embeds)
        return with_second_try(launch, self._context, model=self._name, kind="prefill")

    def _launch_decode(self, step: Step) -> StepOutput:
        """A whole decode step, or the layers of a held one."""
        if step.allocations:
            self._write_block_tables(step.allocations)
        rows = len(step.slots)
        # On a GPU attention reads only as much of a block table as the sequence is long, so one width serves all.
        pages = self._sizes.max_pages if self._context.device.type == "cuda" else step.num_pages
        drafts = {"drafts": step.drafts} if step.drafts else {}
        plan = Plan(arrays={"slots": step.slots}, required={"rows": rows, "pages": pages, **drafts})
        if step.needs.guided:
            return self._hold(step, step.slots, self.graphs.layers.run(plan).route, "decode")
        if step.drafts:
            run = self.graphs.verify[step.needs.full].run(plan)
            results = self._results(run.outputs, rows * (1 + step.drafts), step.needs.logprobs)
            return StepOutput(results, run.route, "verify")
        run = self.graphs.decode[step.needs.full].run(plan)
        return StepOutput(self._results(run.outputs, rows, step.needs.logprobs), run.route, "decode")

    def _launch_prefill(self, step: Step, embeds: Embeds) -> StepOutput:
        """Chunks: replayed if a captured graph holds them, else eagerly. Then their sampling, or its wait for masks."""
        required = required_prefill(step.chunks, self._decoder.feature_levels)
        prefill = self.graphs.prefill_for(required, cached_context=any(chunk.start for chunk in step.chunks))
        with launch_errors(RepeatableLaunchError):
            hidden, classes = self._backbone(step.chunks, embeds, prefill)
            output = self._sample_or_hold(step, hidden, "eager" if prefill is None else "replay")
        if prefill is None:
            reason = self.graphs.cached_prefill.record_miss(required)
            self._context.observations.count_eager_step(reason, model=self._name, kind="prefill")
        return output if classes is None else replace(output, results={**output.results, "classes": classes})

    def _sample_or_hold(self, step: Step, hidden: Tensor, route: Route) -> StepOutput:
        """Samples the sequences whose last chunk has the hidden states [rows, hidden_size], or holds them until their
        masks have arrived."""
        slots = np.array([sequence.slot for sequence in step.sampled], dtype=np.int64)
        if not len(slots):
            return StepOutput({}, route, "prefill")
        if step.needs.guided:
            self.graphs.held_hidden[: len(slots)] = hidden
            return self._hold(step, slots, route, "prefill")
        reported = {"hidden": hidden.float()} if step.needs.hidden else {}
        plan = Plan(arrays={"slots": slots}, tensors={"hidden": [hidden]}, required={"rows": len(slots)})
        run = self.graphs.sample[step.needs.full].run(plan)
        return StepOutput(self._results(run.outputs, len(slots), step.needs.logprobs) | reported, route, "prefill")

    def _hold(self, step: Step, slots: np.ndarray, route: Route, kind: StepKind) -> StepOutput:
        """A step whose hidden states are in `held_hidden`, and whose sampling waits for masks."""
        self._masks.writable()
        return StepOutput({}, route, kind, PendingSampling(slots, step.needs))

    def sample(self, sampling: PendingSampling, masks: MaskJob) -> dict[str, Tensor]:
        """Launches the sampling of a held step, whose masks are done. Returns StepOutput.results."""
        plan = Plan(arrays={}, required={"rows": len(sampling.slots)})
        with self._masks.sent(sampling.slots, masks.rows, masks.count):
            run = self.graphs.guided_sample[sampling.needs.full].run(plan)
        return self._results(run.outputs, len(sampling.slots), sampling.needs.logprobs)

    def _results(self, outputs: Mapping[str, Tensor], rows: int, logprobs: int | None) -> dict[str, Tensor]:
        results = {"results": outputs["results"][:rows]}
        if logprobs is not None:
            tokens = results["results"][:, 0].long()
            names = ("logprobs", "top_values", "top_ids")
            values = log_probabilities(outputs["logits"][:rows], tokens, logprobs)
            results |= dict(zip(names, values, strict=True))
        return results

    def _write_block_tables(self, allocations: tuple[BlockAllocation, ...]) -> None:
        entries = np.array([(entry.slot, entry.index, entry.page) for entry in allocations], dtype=np.int64).T
        slots, indices, pages = upload_arrays({"entries": entries}, self._context.device)["entries"]
        self._state.block_tables.index_put_((slots, indices), pages.to(torch.int32))

    def _backbone(
        self, chunks: tuple[Chunk, ...], embeds: Embeds, prefill: GraphRunner | None
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the decoder over chunks -> hidden [last chunks, hidden_size], and classes [marks] if there are any, with
        one upload. prefill: replays the pass."""
        ends = [chunk.sequence for chunk in chunks if chunk.is_last]
        sizes = self._sizes
        arrays = chunk_arrays(chunks, sizes.page_size, sizes.max_pages)
        if self._decoder.drafter is not None:
            arrays["next_tokens"] = next_tokens(chunks)
        if ends:
            arrays |= admission_arrays(ends, sizes.vocab_limit)
            if self._state.history.shape[1]:
                arrays |= history_arrays(ends)
        sent = upload_arrays(arrays, self._context.device)
        self._state.block_tables.index_copy_(0, sent["chunk_slots"], sent["block_tables"])
        hidden = self._decoder.embed(sent["tokens"])
        if "media_rows" in sent:
            media = self._media(chunks, embeds).to(hidden.dtype)
            hidden = with_features(hidden, media.shape[1]).index_copy(0, sent["media_rows"], media)
        if prefill is not None:
            hidden = self._replay_prefill(prefill, chunks, arrays, hidden, sent)
        else:
            hidden = self.graphs.eager_chunks(hidden, sent)
        if ends:
            self._admit(sent)  # After the launch of the pass, which a GPU then runs meanwhile.
        marks = sent.get("mark_rows")
        classes = None if marks is None else self._decoder.logits(hidden[marks]).argmax(dim=1)
        return hidden[sent["last_rows"]], classes

    def _replay_prefill(
        self,
        prefill: GraphRunner,
        chunks: tuple[Chunk, ...],
        arrays: Mapping[str, np.ndarray],
        hidden: Tensor,
        sent: Mapping[str, Tensor],
    ) -> Tensor:
        """Replays chunks with the captured prefill that holds them -> hidden [tokens of the bucket, hidden_size]."""
        required = required_prefill(chunks, self._decoder.feature_levels)
        graph = prefill.graph_for(required)
        assert graph is not None
        hidden = with_features(hidden, self._decoder.hidden_size * (1 + graph.bucket.get("levels", 0)))
        named = {"cu_seqlens": arrays["cu_seqlens_q"]}
        if prefill is self.graphs.cached_prefill:
            named |= {"slots": arrays["chunk_slots"], "seq_lens": np.diff(arrays["cu_seqlens_k"])}
        if self._state.states:
            named |= {name: arrays[name] for name in STATE_BUFFERS}
        if self._decoder.drafter is not None:
            named["next_tokens"] = arrays["next_tokens"]
        plan = Plan(
            arrays=named,
            tensors={"hidden": [hidden], "positions": [sent["positions"].T], "slot_mapping": [sent["slot_mapping"]]},
            fills={"cu_seqlens": len(hidden)},
            required=required,
        )
        return prefill.run(plan).outputs["hidden"]

    def _media(self, chunks: tuple[Chunk, ...], embeds: Embeds) -> Tensor:
        """Embeddings of the media positions in the chunks, [media positions, embeds_width]."""
        places = [(chunk, rows) for chunk in chunks for rows in chunk.sequence.media_rows(chunk.start, chunk.end)]
        return torch.cat(
            [embeds(chunk.sequence, rows.item)[rows.offset : rows.offset + rows.length] for chunk, rows in places]
        )

    def _admit(self, sent: Mapping[str, Tensor]) -> None:
        """Writes the slot state of sequences whose prefill ends in this step."""
        state, slots = self._state, sent["new_slots"]
        for name in ("ints", "floats", "stop_ids", "bias_ids", "bias_values"):
            getattr(state, name).index_copy_(0, slots, sent[f"new_{name}"])
        if "full_slots" in sent:
            state.prompt_seen[sent["full_slots"]] = False
            state.output_counts[sent["full_slots"]] = 0
            state.prompt_seen.index_put_((sent["prompt_slots"], sent["prompt_ids"]), state.prompt_seen.new_ones(()))
            counted = sent["output_slots"], sent["output_ids"]
            state.output_counts.index_put_(counted, state.output_counts.new_ones(counted[0].shape), accumulate=True)
        if "history_ids" in sent:
            places = sent["history_slots"], sent["history_places"]
            state.history.index_put_(places, sent["history_ids"].to(torch.int32))
