"""Runs a scheduled step on the model: slot state, prefill, then tail or decode step, then the codec. Before there are
requests, runs over the scratch slot and page measure costs and memory, and compile the kernels of eager runs.

Computations with one row per stream (tail, decode step, codec) are replayed, and so are prefills that fit a captured
graph. Other prefills run eagerly. On a GPU the codec has its own CUDA stream: a
step's patches are decoded to audio while the next step runs. A decode step takes one upload and one readback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, Plan
from models.layers.kv_cache import PagedBatch, allocate_together
from models.protocol import RESULT_FLAGS, SpeechModel
from service.engine.core.faults import RepeatableLaunchError, launch_errors, with_second_try
from service.engine.core.pages import block_tables, packed_chunks, pages_for, scratch_chunks
from service.engine.core.readback import Mark, Readback, mark, seconds_between
from service.engine.core.worker import WARM_SEQUENCES, WARM_TOKENS, WorkerContext
from service.engine.speech.capacity import AdapterFiles
from service.engine.speech.forecast import Kind, SpeechCosts, eager_cost_key, replayed_cost_key
from service.engine.speech.graphs import SpeechGraphs, make_runner
from service.engine.speech.sequence import SpeechSequence
from service.engine.speech.stream import PrefillChunk, PrefillSize, Stream
from service.graphs.buckets import powers_of_two
from service.graphs.buffers import upload_arrays
from service.graphs.observations import EagerReason, Route
from service.graphs.runner import GraphRunner, Run

_PATIENT_ROWS = 32
"""Up to here the codec takes what the steps leave free of the GPU: steps of few rows leave much, and chat may run
beside them. Steps of more rows would hold up all of their own audio, so the codec goes first then."""
_BELOW_STEPS, _ABOVE_STEPS = 0, -2
"""Priorities; that of the engine's stream, on which steps run, is -1."""


class CodecStream:
    """Where one model's codec is launched: on a GPU, in a CUDA stream with a lower priority than the steps'. A second
    one, with a higher priority, only gives this to graphs that are captured on it. No other stream touches the codec's
    streaming state."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {
            priority: torch.cuda.Stream(device, priority=priority)
            for priority in (_BELOW_STEPS, _ABOVE_STEPS)
            if device.type == "cuda"
        }

    @property
    def beside(self) -> bool:
        """Whether the codec runs in parallel with the next step, not before it."""
        return bool(self._streams)

    @contextmanager
    def after_steps(self) -> Iterator[None]:
        """Launches inside go to the codec's CUDA stream, after everything launched before."""
        if not self._streams:
            yield
            return
        stream = self._streams[_BELOW_STEPS]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def capture_stream(self, bucket: Bucket) -> torch.cuda.Stream | None:
        """The stream whose priority a captured graph of the codec has."""
        return self._streams.get(_BELOW_STEPS if bucket["rows"] <= _PATIENT_ROWS else _ABOVE_STEPS)

    def keep(self, tensor: Tensor) -> None:
        """Keeps a tensor's memory until what the codec has been given to do is done."""
        if self._streams:
            tensor.record_stream(self._streams[_BELOW_STEPS])


def make_copies(streams: Sequence[Stream], pages_of_layers: Sequence[Tensor]) -> None:
    """Makes the copies that these streams wait for. pages_of_layers: models.layers.kv_cache.allocate_together.

    All sources are read before a page is written: by now one may belong to a stream that gets a copy of another. So if
    memory runs out, no page has been written, and all copies are still to be made.
    """
    copies = [stream.page_copy for stream in streams if stream.page_copy is not None]
    if not copies:
        return
    pages = upload_arrays({"pages": np.array(copies, dtype=np.int64).T}, pages_of_layers[0].device)["pages"]
    sources = [layers.index_select(1, pages[0]) for layers in pages_of_layers]
    for layers, read in zip(pages_of_layers, sources, strict=True):
        layers.index_copy_(1, pages[1], read)
    for stream in streams:
        stream.page_copy = None


# The slot-state tables, and host arrays of passes from scheduled chunks and sequences, to be uploaded.


def slot_state(model: SpeechModel, max_streams: int, max_pages: int, device: torch.device) -> dict[str, Tensor]:
    """The model's tables and the block table, one row per slot and the scratch slot."""
    rows = max_streams + 1
    state = {
        name: torch.zeros((rows, *spec.shape), dtype=spec.dtype, device=device)
        for name, spec in model.state_specs().items()
    }
    state["block_table"] = torch.zeros((rows, max_pages), dtype=torch.int32, device=device)
    return state


def slots_of(sequences: Sequence[SpeechSequence]) -> np.ndarray:
    """Request slots int64 [rows]."""
    return np.array([sequence.stream.slot for sequence in sequences], dtype=np.int64)


def adapter_slot(sequence: SpeechSequence) -> int:
    """By which the rows of a step are sorted."""
    return sequence.stream.adapter_slot


def adapter_slots_of(sequences: Sequence[SpeechSequence], positions: int | Sequence[int] = 1) -> np.ndarray:
    """The adapter's slot int32 of each row, or of so many positions of each prompt; -1 for none."""
    return np.repeat(np.array([adapter_slot(sequence) for sequence in sequences], dtype=np.int32), positions)


def slots_plan(slots: np.ndarray) -> Plan:
    """The plan of a step with a row for each of these slots int64 [rows]."""
    return Plan(arrays={"slots": slots}, required={"rows": len(slots)})


def prompt_arrays(
    chunks: Sequence[tuple[PrefillChunk, SpeechSequence]], page_size: int, patch_shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Chunks packed one behind the other: the inputs of SpeechModel.prefill, and packed_chunks. patch_shape: (latent
    frames, channels) of a patch."""
    ids, positions, index, patches = [], [], [], [np.zeros((0, *patch_shape), np.float32)]
    audio = 0
    for chunk, sequence in chunks:
        prompt, stop = sequence.prompt, chunk.start + chunk.length
        mask = prompt.audio_mask[chunk.start : stop]
        before, count = int(prompt.audio_mask[: chunk.start].sum()), int(mask.sum())
        ids.append(prompt.token_ids[chunk.start : stop])
        positions.append(np.arange(chunk.start, stop))
        index.append(np.where(mask, audio + np.cumsum(mask) - 1, -1))
        patches.append(prompt.patches[before : before + count])
        audio += count
    ends = np.cumsum([chunk.length for chunk, _ in chunks])
    places = [(sequence.stream.pages, chunk.start, chunk.start + chunk.length) for chunk, sequence in chunks]
    return {
        "token_ids": np.concatenate(ids),
        "positions": np.concatenate(positions),
        "patches": np.concatenate(patches),
        "patch_index": np.concatenate(index),
        "last": ends[[chunk.is_last for chunk, _ in chunks]] - 1,
    } | packed_chunks(places, page_size)


def slot_state_arrays(sequences: Sequence[SpeechSequence], patch_shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Rows of the slot state after a prompt, block tables aside; models.protocol.SpeechModel describes them."""
    count = len(sequences)
    prompts = [sequence.prompt for sequence in sequences]
    last_patch = np.zeros((count, *patch_shape), dtype=np.float32)
    for row, sequence in enumerate(sequences):
        if sequence.prompt.audio_mask[-1]:
            last_patch[row] = sequence.prompt.patches[-1]
    return {
        "slots": slots_of(sequences),
        "last_patch": last_patch,
        "length": np.array([len(prompt.token_ids) for prompt in prompts], np.int32),
        "step": np.zeros(count, dtype=np.int32),
        "active": np.ones(count, dtype=np.bool_),
        "min_patches": np.array([prompt.min_patches for prompt in prompts], np.int32),
        "max_patches": np.array([prompt.max_patches for prompt in prompts], np.int32),
        "seed": np.array([sequence.seed for sequence in sequences], np.int64),
        "cfg": np.array([sequence.request.cfg_value for sequence in sequences], np.float32),
        "temperature": np.array([sequence.request.temperature for sequence in sequences], np.float32),
    }


def emitted(patches: np.ndarray) -> np.ndarray:
    """Step results that hold these patches float32 [n, frames, channels] and did not stop."""
    flags = np.array([name == "emitted" for name in RESULT_FLAGS], dtype=np.float32)
    return np.hstack([patches.reshape(len(patches), -1), np.tile(flags, (len(patches), 1))])


def prefill_plan(arrays: Mapping[str, np.ndarray], slots: np.ndarray, required: Bucket) -> Plan:
    """The plan of a captured prefill (models.protocol.SpeechModel.prefill_step) of the prompts in these slots int64
    [chunks]."""
    buffers = dict(arrays) | {"slots": slots}
    buffers["cu_seqlens"], buffers["seq_lens"] = buffers.pop("cu_seqlens_q"), np.diff(buffers.pop("cu_seqlens_k"))
    buffers.pop("context_slots", None)
    return Plan(buffers, required, fills={"patch_index": -1, "cu_seqlens": required["tokens"], "lora_slots": -1})


@dataclass(frozen=True, eq=False)
class Timing:
    """A timed part of a launch, under the key of its cost, with marks at begin and end."""

    kind: Kind
    solver_steps: int
    size: int
    start: Mark
    end: Mark


@dataclass(eq=False)
class Launch:
    """A step, or the encoding of a piece of reference audio, whose results have not been read."""

    rows: list[tuple[SpeechSequence, int]]
    """Sequence and segment of every row, in the order of the copied arrays."""
    readback: Readback
    kind: str
    route: str
    timings: list[Timing] = field(default_factory=list)
    launched_at: float = 0.0
    """On the worker's clock, as InFlight.add was told."""
    predicted: float = 0.0
    """Seconds that it was predicted to take, as InFlight.add was told."""
    prompts: Sequence[SpeechSequence] = ()
    """Sequences of which it computes a part of the prompt, or all of it without a first patch: those have no row."""
    reference_id: str | None = None
    """The EncodeReference request that this launch completes."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """A row's result: audio float32 [samples], patch float32 [frames, channels]. stopped, finished: as in
    models.protocol.SpeechModel.decode_step."""

    sequence: SpeechSequence
    segment: int
    audio: np.ndarray
    patch: np.ndarray
    stopped: bool
    finished: bool
    finite: bool
    """Whether neither audio nor patch has a NaN or an infinity."""


class SpeechRunner:
    """Owns caches, slot state and captured graphs of one speech model.

    decode, tail, prefill: the runners of rows without adapters (SpeechGraphs); the first two by number of solver steps.
    vae: the codec's.
    """

    def __init__(
        self,
        name: str,
        model: SpeechModel,
        context: WorkerContext,
        *,
        num_pages: int,
        buckets: Sequence[int],
        adapters: AdapterFiles,
    ) -> None:
        self.model = model
        self.buckets = tuple(buckets)
        self.solver_steps = context.config.solver_steps or model.solver_steps
        self._name = name
        self._context = context
        self.device = context.device
        self.page_size = context.config.page_size
        self._max_pages = pages_for(model.max_positions, self.page_size)
        self.caches, self._pages_of_layers = allocate_together(
            model.cache_specs(), num_pages, self.page_size, context.device, context.dtype
        )
        self.state = slot_state(model, context.config.slots, self._max_pages, context.device)
        self._codec_starts: WeakKeyDictionary[SpeechSequence, Tensor] = WeakKeyDictionary()
        """The codec's streaming state before the current segment, of later segments that may be retried."""
        self.codec = CodecStream(context.device)
        self.bank = adapters.bank(context.device, context.dtype)
        make = partial(SpeechGraphs, name, model, context, self.state, self.caches, self.buckets, self.solver_steps)
        self._plain = make()
        self._adapted = None if self.bank is None else make(bank=self.bank)
        self.decode, self.tail, self.prefill = self._plain.decode, self._plain.tail, self._plain.prefill
        rows = [{"rows": bucket} for bucket in self.buckets]
        self.vae = make_runner(name, "vae", model.vae_step(self.state), rows, context, None, self.codec.capture_stream)

    @property
    def graph_runners(self) -> list[GraphRunner]:
        """In the order of their captures: where graphs have little room, those of every step get it."""
        plain, adapted = self._plain, self._adapted
        runners = [*plain.decode.values(), self.vae, *plain.others]
        return runners if adapted is None else [*runners, *adapted.decode.values(), *adapted.others]

    @property
    def variants(self) -> list[SpeechGraphs]:
        """The graphs for rows without adapters, and those for rows with adapters if there are any."""
        return [self._plain] if self._adapted is None else [self._plain, self._adapted]

    def _graphs_of(self, slots: np.ndarray) -> SpeechGraphs:
        """slots: those of the adapters, -1 for none. Rows without an adapter run with the others if any row has one."""
        return self._plain if self._adapted is None or (slots < 0).all() else self._adapted

    def captured_prefill(self, required: Bucket) -> Bucket | None:
        """Bucket of the captured graph that would replay this prefill."""
        graph = self.prefill.graph_for(required)
        return None if graph is None else graph.bucket

    # Steps

    def launch_decode(self, sequences: Sequence[SpeechSequence], solver_steps: int) -> Launch:
        """One decode step of all rows and their audio. Rows share the number of solver steps."""
        sequences = sorted(sequences, key=adapter_slot)
        slots = slots_of(sequences)
        start = mark(self.device)
        adapters = adapter_slots_of(sequences)
        graphs = self._graphs_of(adapters)
        run = graphs.decode[solver_steps].run(graphs.plan(slots, adapters))
        timings = [Timing("decode", solver_steps, self._bucket(len(slots)), start, mark(self.device))]
        rows = list(range(len(sequences)))
        return self._deliver(sequences, slots, [(run, rows)], timings, "decode", run.route)

    def launch_prefill(self, chunks: Sequence[tuple[PrefillChunk, SpeechSequence]], *, tail: bool) -> Launch:
        """One pass over prompt chunks; then the tail and the audio of all prompts that end. tail: False leaves the
        first patches to the next decode step.

        A pass that runs out of memory has a second try.
        """
        required = PrefillSize.of(chunk for chunk, _ in chunks).required
        adapters = adapter_slots_of([sequence for _, sequence in chunks], [chunk.length for chunk, _ in chunks])
        graphs = self._graphs_of(adapters)
        graph = graphs.prefill.graph_for(required)
        launch = partial(self._launch_pass, chunks, graphs, adapters, None if graph is None else required)
        start, conditioning = with_second_try(launch, self._context, model=self._name, kind="prefill")
        # Beside the pass: a first sound does not wait for the codec to be prepared.
        self._begin_attempts([sequence for _, sequence in chunks if sequence.begins])
        ready = [sequence for chunk, sequence in chunks if chunk.is_last]
        self._initialise_slots(ready, conditioning)
        if graph is None:
            part, size = eager_cost_key(required["tokens"])
            reason: EagerReason = "ragged" if self._context.config.graphs else "disabled"
            self._context.observations.count_eager_step(reason, model=self._name, kind="prefill")
        else:
            part, size = replayed_cost_key(graph.bucket)
        timings = [Timing(part, 0, size, start, mark(self.device))]
        emitting = sorted(ready, key=adapter_slot) if tail else []
        runs = self._run_tails(emitting, timings)
        route: Route = "eager" if graph is None else "replay"
        launched = self._deliver(emitting, slots_of(emitting), runs, timings, "prefill", route)
        launched.prompts = [sequence for chunk, sequence in chunks if not (tail and chunk.is_last)]
        return launched

    def _launch_pass(
        self,
        chunks: Sequence[tuple[PrefillChunk, SpeechSequence]],
        graphs: SpeechGraphs,
        adapters: np.ndarray,
        required: Bucket | None,
    ) -> tuple[Mark, Tensor]:
        """The mark before a pass over prompt chunks, and its conditioning [prompts that end, width], after a replay
        with padding behind. required: to be replayed in a captured prefill of this size; None: eagerly."""
        start, sequences = mark(self.device), [sequence for _, sequence in chunks]
        with launch_errors(RepeatableLaunchError):
            tables = block_tables([sequence.stream.pages for sequence in sequences], self._max_pages)
            self._write_rows(upload_arrays({"slots": slots_of(sequences), "block_table": tables}, self.device))
            make_copies([sequence.stream for sequence in sequences], self._pages_of_layers)
            arrays = prompt_arrays(chunks, self.page_size, self.model.patch_shape) | graphs.lora_arrays(adapters)
            if required is None:
                return start, self._eager_pass(arrays)
            plan = prefill_plan(arrays, slots_of(sequences), required)
            return start, graphs.prefill.run(plan).outputs["conditioning"]

    def _run_tails(self, sequences: Sequence[SpeechSequence], timings: list[Timing]) -> list[tuple[Run, list[int]]]:
        """A tail for each number of solver steps, with the indices of its rows in `sequences`. Its timing is added to
        `timings`, behind that of the pass."""
        runs: list[tuple[Run, list[int]]] = []
        for solver_steps in sorted({sequence.request.solver_steps for sequence in sequences}):
            rows = [i for i, sequence in enumerate(sequences) if sequence.request.solver_steps == solver_steps]
            group = [sequences[i] for i in rows]
            adapters = adapter_slots_of(group)
            graphs = self._graphs_of(adapters)
            runs.append((graphs.tail[solver_steps].run(graphs.plan(slots_of(group), adapters)), rows))
            size = self._bucket(len(rows))
            timings.append(Timing("tail", solver_steps, size, timings[-1].end, mark(self.device)))
        return runs

    def _deliver(
        self,
        sequences: Sequence[SpeechSequence],
        slots: np.ndarray,
        runs: Sequence[tuple[Run, list[int]]],
        timings: list[Timing],
        kind: str,
        route: Route,
    ) -> Launch:
        """Codec step of the rows, then one readback: patch, stopped, finished, audio per row."""
        if not sequences:
            return Launch([], Readback({}, self.device), kind, route, timings)
        # Copies, since the next step overwrites the outputs while the codec still reads them.
        parts = [run.outputs["results"][: len(rows)] for run, rows in runs]
        results = parts[0].clone() if len(parts) == 1 else torch.cat(parts)
        order = [row for _, rows in runs for row in rows]
        with self.codec.after_steps():
            start = mark(self.device)
            plan = slots_plan(slots[order])
            plan.tensors["results"] = [results]
            run = self.vae.run(plan)
            end = mark(self.device)
            down = torch.cat([results[:, :-1], run.outputs["audio"][: len(order)]], dim=1)
            readback = Readback({"packed": down}, self.device)
        self.codec.keep(results)
        timings.append(Timing("vae", 0, self._bucket(len(order)), start, end))
        rows = [(sequences[row], sequences[row].segment) for row in order]
        return Launch(rows, readback, kind, route, timings)

    def outcomes(self, launch: Launch) -> list[Outcome]:
        """Results of a launch that have arrived, as copies."""
        if not launch.rows:
            return []
        shape = self.model.patch_shape
        values, packed = shape[0] * shape[1], launch.readback.read()["packed"]
        with np.errstate(over="ignore", invalid="ignore"):
            sums = packed.sum(axis=1)
        return [
            Outcome(
                sequence=sequence,
                segment=segment,
                audio=row[values + 2 :].copy(),
                patch=row[:values].reshape(shape).copy(),
                stopped=bool(row[values]),
                finished=bool(row[values + 1]),
                finite=finite,
            )
            for (sequence, segment), row, finite in zip(launch.rows, packed, np.isfinite(sums).tolist(), strict=True)
        ]

    # Parts of a prefill

    def _begin_attempts(self, sequences: Sequence[SpeechSequence]) -> None:
        """Prepares the codec's streaming state for attempts that begin. The state continues from one segment to the
        next, and is made again where the slot was taken in between; a retry of a segment starts from the same state as
        the first attempt."""
        for sequence in sequences:
            sequence.begins = False
        fresh = [sequence for sequence in sequences if sequence.segment == 0 or len(sequence.prompt.priming)]
        self._reset_codec(fresh)
        later = [sequence for sequence in sequences if sequence not in fresh and sequence.request.retries]
        if not later:
            return
        with self.codec.after_steps():
            for sequence in later:
                state = self.state["vae"][sequence.stream.slot]
                if sequence.attempt:
                    state.copy_(self._codec_starts[sequence])
                else:
                    self._codec_starts[sequence] = state.clone()

    def _reset_codec(self, sequences: Sequence[SpeechSequence]) -> None:
        """Initialises the codec's streaming state in new slots: zeros, or the state after decoding the end of the audio
        that they continue, which is not sent."""
        if not sequences:
            return
        with self.codec.after_steps():
            slots = upload_arrays({"slots": slots_of(sequences)}, self.device)["slots"]
            self.state["vae"].index_fill_(0, slots, 0.0)
            for index in range(max(len(sequence.prompt.priming) for sequence in sequences)):
                group = [sequence for sequence in sequences if index < len(sequence.prompt.priming)]
                plan = slots_plan(slots_of(group))
                plan.arrays["results"] = emitted(np.stack([sequence.prompt.priming[index] for sequence in group]))
                self.vae.run(plan)

    def _eager_pass(self, arrays: Mapping[str, np.ndarray]) -> Tensor:
        """The model's pass over prompt chunks (prompt_arrays) -> conditioning [prompts that end, width]."""
        inputs = upload_arrays(arrays, self.device)
        batch = PagedBatch(
            self.caches,
            self.page_size,
            inputs["slot_mapping"],
            cu_seqlens_q=inputs["cu_seqlens_q"],
            cu_seqlens_k=inputs["cu_seqlens_k"],
            context_slots=inputs.get("context_slots"),
        )
        return self.model.prefill(inputs, batch, self.bank if "lora_slots" in inputs else None)

    def _initialise_slots(self, ready: Sequence[SpeechSequence], conditioning: Tensor) -> None:
        """Writes the slot state of streams whose prefill is complete, so that their first patch comes next.
        conditioning: theirs, then padding."""
        if not ready:
            return
        device = upload_arrays(slot_state_arrays(ready, self.model.patch_shape), self.device)
        self.state["conditioning"].index_copy_(0, device["slots"], conditioning[: len(ready)])
        self._write_rows(device)

    def _write_rows(self, device: dict[str, Tensor]) -> None:
        """Writes rows of the slot state's tables, by name, for `slots`."""
        slots = device.pop("slots")
        for name, values in device.items():
            table = self.state[name]
            table.index_copy_(0, slots, values.to(table.dtype))

    def _bucket(self, rows: int) -> int:
        return next((bucket for bucket in self.buckets if bucket >= rows), rows)

    # Runs before there are requests

    def calibrate(self, costs: SpeechCosts, buckets: Sequence[int], prompt_lengths: Sequence[int]) -> None:
        """Measures costs at the default number of solver steps, so that the first requests are scheduled by them.
        Buckets that run in one captured graph, as after a restart, are measured once."""
        solver_steps = self.solver_steps[0]
        seconds: dict[tuple[Kind, int], float] = {}

        def observe(kind: Kind, steps: int, part: GraphRunner, rows: int) -> None:
            graph = part.graph_for({"rows": rows})
            size = rows if graph is None else graph.bucket["rows"]
            if (kind, size) not in seconds:
                plan = slots_plan(np.zeros(rows, dtype=np.int64))
                seconds[kind, size] = self._timed(partial(part.run, plan))
            costs.observe(kind, steps, rows, seconds[kind, size])

        for bucket in buckets:
            observe("decode", solver_steps, self.decode[solver_steps], bucket)
            observe("tail", solver_steps, self.tail[solver_steps], bucket)
            with self.codec.after_steps():
                observe("vae", 0, self.vae, bucket)
        for length in prompt_lengths:
            kind, size = eager_cost_key(length)
            costs.observe(kind, 0, size, self._timed(partial(self._scratch_prefill, [length])))
        for captured in self.prefill.captured:
            kind, size = replayed_cost_key(captured)
            costs.observe(kind, 0, size, self._timed(partial(self.prefill.run, self._full_prompt(captured))))

    def _timed(self, launch: Callable[[], object]) -> float:
        """Seconds of the second run, since the first may compile or allocate."""
        launch()
        start = mark(self.device)
        launch()
        end = mark(self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return seconds_between(start, end)

    def warm_up(self) -> Iterator[None]:
        """Runs what may run eagerly: steps and prefills of each power of two, prefills with cached context and of many
        prompts. Yields after each. All numbers of solver steps use the same kernels."""
        config, solver_steps = self._context.config, self.solver_steps[0]
        rows = powers_of_two(config.slots)
        yield from self.vae.warm_up({"rows": count} for count in rows)
        for graphs in self.variants:
            for part in (graphs.decode[solver_steps], graphs.tail[solver_steps]):
                yield from part.warm_up({"rows": count} for count in rows)
            yield from graphs.prefill.warm_up(graphs.prefill.bucket_list)
        prompts = [([tokens], 0) for tokens in powers_of_two(min(config.max_step_tokens, WARM_TOKENS))]
        prompts += [([1, 2], self.page_size), ([1] * WARM_SEQUENCES, 0)]
        for graphs in self.variants:
            for lengths, cached in prompts:
                self._scratch_prefill(lengths, cached=cached, graphs=graphs)
                yield

    def largest_runs(self, reference_samples: int) -> Iterator[Callable[[], object]]:
        """What takes most memory eagerly, but for the codec: the longest prefill, the largest batch of each step, a
        piece of reference audio."""
        graphs = self.variants[-1]
        yield partial(self._scratch_prefill, [self._context.config.max_step_tokens], graphs=graphs)
        # Fewer tokens may take more memory: attention splits their keys and keeps partial results (paged_prefill).
        for bucket in graphs.prefill.bucket_list:
            yield graphs.prefill.filler_run(bucket)
        for part in (graphs.decode, graphs.tail):
            yield part[self.solver_steps[0]].filler_run({"rows": self.buckets[-1]})
        wave = torch.zeros(reference_samples, device=self.device)
        yield lambda: next(iter(self.model.encode_reference_pieces(wave, "right")))

    def largest_codec_run(self) -> None:
        """The codec's largest eager run, which other steps run beside."""
        with self.codec.after_steps():
            self.vae.filler_run({"rows": self.buckets[-1]})()

    def _scratch_prefill(
        self, lengths: Sequence[int], *, cached: int = 0, graphs: SpeechGraphs | None = None
    ) -> Tensor:
        """A prefill of prompts of audio positions only, the costliest, each after `cached` keys. graphs: those whose
        inputs it gets; no position has an adapter."""
        length = sum(lengths)
        arrays: dict[str, np.ndarray] = {
            "token_ids": np.zeros(length, dtype=np.int64),
            "positions": np.arange(length) % self.model.max_positions,
            "patch_index": np.arange(length),
            "patches": np.zeros((length, *self.model.patch_shape), dtype=np.float32),
            "last": np.cumsum(lengths) - 1,
        }
        arrays |= scratch_chunks(lengths, cached, self.page_size)
        if graphs is not None:
            arrays |= graphs.lora_arrays(np.full(length, -1))
        return self._eager_pass(arrays)

    def _full_prompt(self, bucket: Bucket) -> Plan:
        """A prompt that fills a captured prefill, as far as the context allows."""
        index = np.arange(min(bucket["tokens"], self.model.max_positions))
        arrays = {"positions": index, "patch_index": np.where(index < bucket["audio"], index, -1)}
        arrays |= scratch_chunks([len(index)], 0, self.page_size)
        return prefill_plan(arrays, np.zeros(1, dtype=np.int64), bucket)
