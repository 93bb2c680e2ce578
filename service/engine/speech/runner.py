"""Runs a scheduled step on the model: slot state, prefill, then tail or decode step, then the codec.

What has one row per stream (tail, decode step, codec) goes through recordings, and so do prefills of prompts without a
past. Other prefills run eagerly in one ragged pass, decode rows included. On a GPU the codec has a stream of its own:
a step's patches become sound beside the next step. One packed upload per pass, one packed copy down per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from models.layers.kv_cache import PagedBatch
from models.protocol import RESULT_FLAGS, Capturable, Plan, SpeechModel
from service.engine.arrival import Arrival
from service.engine.faults import prefill_errors
from service.engine.speech.clock import DeviceClock, Mark
from service.engine.speech.costs import Kind
from service.engine.speech.plans import pages_for, ragged_plan, seat_arrays, slot_state, slots_of, slots_plan
from service.engine.speech.prefill import Capacity, PrefillChunk, eager_prefill, prefill_needs, replayed_prefill
from service.engine.speech.sequence import SpeechSequence
from service.engine.worker import WorkerContext
from service.graphs.accounting import Route
from service.graphs.buffers import upload
from service.graphs.runner import GraphRunner, Run

_PREFILL_TOKENS = {"cuda": (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024), "cpu": (64,)}
"""Rungs of recorded prefills, each for text alone and for as many patches as tokens. Up to about a thousand tokens
launches, and not the GPU, bound an eager prefill."""
_HOT_PREFILLS = {"cuda": ((64, 128, 256, 1024), (256, 1024)), "cpu": ((64,), (64,))}
"""Tokens of the rungs that are recorded before readiness: for text alone, with patches."""
_PREFILL_SEQUENCES = 16
_RARE_STRIDE = 4
"""Of the rungs for numbers of solver steps that few ask for, every so many are recorded before there is demand."""


@dataclass(frozen=True, eq=False)
class Timing:
    """What was timed, in the cost model's terms, and its marks."""

    kind: Kind
    solver_steps: int
    size: int
    start: Mark
    end: Mark


@dataclass(eq=False)
class Flight:
    """A step that was launched. rows: the sequence and segment of every row, in the order of the copied arrays."""

    rows: list[tuple[SpeechSequence, int]]
    arrival: Arrival
    predicted: float
    launched: float
    kind: str
    route: str
    timings: list[Timing] = field(default_factory=list)
    clip: str | None = None
    """Request whose clip arrives with this launch."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """A row's result: audio float32 [samples], patch float32 [frames, channels]."""

    sequence: SpeechSequence
    segment: int
    audio: np.ndarray
    patch: np.ndarray
    stopped: bool
    finished: bool


class SpeechRunner:
    """Owns caches, slot state and recordings of one speech model.

    decode, tail: by number of solver steps. What runs them before there are requests is in scratch.py.
    """

    def __init__(
        self,
        name: str,
        model: SpeechModel,
        context: WorkerContext,
        *,
        num_pages: int,
        max_streams: int,
        buckets: Sequence[int],
    ) -> None:
        self.model = model
        self.buckets = tuple(buckets)
        self._name = name
        self._context = context
        self.device, self.dtype = context.device, context.dtype
        self.page_size = context.config.page_size
        self._max_pages = pages_for(model.max_positions, self.page_size)
        self.clock = DeviceClock(context.device)
        self.caches = [
            spec.allocate(num_pages, self.page_size, context.device, context.dtype) for spec in model.cache_specs()
        ]
        self.state = slot_state(model, max_streams, self._max_pages, context.device)
        self._codec_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        rows = [{"rows": bucket} for bucket in self.buckets]
        default, rare = model.solver_steps[0], rows[::-_RARE_STRIDE]

        def by_steps(kind: str, step: Callable[[int], Capturable]) -> dict[int, GraphRunner]:
            return {
                steps: self._runner(kind, step(steps), rows, hot=None)
                if steps == default
                else self._runner(kind, step(steps), rare, hot=())
                for steps in model.solver_steps
            }

        self.decode = by_steps(
            "decode", lambda steps: model.decode_step(steps, self.state, self.caches, self.page_size)
        )
        self.tail = by_steps("tail", lambda steps: model.tail(steps, self.state))
        self.vae = self._runner("vae", model.vae_step(self.state), rows, hot=None, stream=self._codec_stream)
        ladder, hot = prefill_ladder(context.device.type, context.config.max_step_tokens)
        self.prefill = self._runner("prefill", model.prefill_step(self.caches, self.page_size), ladder, hot=hot)

    def _runner(
        self,
        kind: str,
        capturable: Capturable,
        ladder: Sequence[Capacity],
        hot: Sequence[Capacity] | None,
        stream: torch.cuda.Stream | None = None,
    ) -> GraphRunner:
        context = self._context
        return GraphRunner(
            self._name,
            kind,
            capturable,
            ladder,
            context.pool,
            context.observations,
            enabled=context.config.graphs,
            hot=hot,
            stream=stream,
        )

    @property
    def codec_beside(self) -> bool:
        """The codec runs beside the next step, not before it."""
        return self._codec_stream is not None

    @contextmanager
    def codec_turn(self) -> Iterator[None]:
        """What is launched inside goes to the codec's stream, behind everything launched before. It alone touches the
        codec's memory."""
        if self._codec_stream is None:
            yield
            return
        self._codec_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._codec_stream):
            yield

    @property
    def graph_runners(self) -> list[GraphRunner]:
        return [*self.decode.values(), *self.tail.values(), self.vae, self.prefill]

    def recorded_prefill(self, needs: Capacity) -> Capacity | None:
        """Capacity of the recording that replays a prefill of these needs."""
        bucket = self.prefill.bucket_for(needs)
        return None if bucket is None else bucket.capacity

    # Steps

    def launch_decode(
        self, sequences: Sequence[SpeechSequence], solver_steps: int, *, predicted: float, now: float
    ) -> Flight:
        """One decode step of all rows and its audio. Rows share the number of solver steps."""
        slots = slots_of(sequences)
        start = self.clock.mark()
        run = self.decode[solver_steps].run(slots_plan(slots))
        timings = [Timing("decode", solver_steps, self._bucket(len(slots)), start, self.clock.mark())]
        rows = list(range(len(sequences)))
        return self._deliver(sequences, slots, [(run, rows)], timings, predicted, now, "decode", run.route)

    def launch_prefill(
        self,
        chunks: Sequence[tuple[PrefillChunk, SpeechSequence]],
        riders: Sequence[SpeechSequence],
        *,
        predicted: float,
        now: float,
    ) -> Flight:
        """One pass over prompt chunks and decode rows; then the tail and the audio of all rows that emit.

        Raises PrefillError when the pass failed: the decode rows are as they were.
        """
        needs = prefill_needs([chunk for chunk, _ in chunks])
        capacity = None if needs is None or riders else self.recorded_prefill(needs)
        start = self.clock.mark()
        with prefill_errors():
            self._reset_codec([sequence for chunk, sequence in chunks if chunk.start == 0 and sequence.segment == 0])
            if needs is None or capacity is None:
                conditioning = self._backbone(chunks, riders)
            else:
                conditioning = self._replay_prompts(chunks, needs)
        ready = [sequence for chunk, sequence in chunks if chunk.last]
        self._seat(ready)
        kind = "mixed" if riders else "prefill"
        route: Route = "eager" if capacity is None else "replay"
        if capacity is None:
            part, size = eager_prefill(sum(chunk.length for chunk, _ in chunks) + len(riders))
            self._context.observations.count_eager_step("ragged", model=self._name, kind=kind)
        else:
            part, size = replayed_prefill(capacity)
        timings = [Timing(part, 0, size, start, self.clock.mark())]
        emitting = [*riders, *ready]
        runs: list[tuple[Run, list[int]]] = []
        for solver_steps in sorted({sequence.request.solver_steps for sequence in emitting}):
            rows = [i for i, sequence in enumerate(emitting) if sequence.request.solver_steps == solver_steps]
            plan = slots_plan(slots_of([emitting[i] for i in rows]))
            plan.tensors["conditioning"] = consecutive(conditioning, rows)
            runs.append((self.tail[solver_steps].run(plan), rows))
            timings.append(self._timing("tail", solver_steps, len(rows), timings))
        return self._deliver(emitting, slots_of(emitting), runs, timings, predicted, now, kind, route)

    def _timing(self, kind: Kind, solver_steps: int, rows: int, before: Sequence[Timing]) -> Timing:
        """Of the part that has just been launched, behind those `before`."""
        return Timing(kind, solver_steps, self._bucket(rows), before[-1].end, self.clock.mark())

    def _deliver(
        self,
        sequences: Sequence[SpeechSequence],
        slots: np.ndarray,
        runs: Sequence[tuple[Run, list[int]]],
        timings: list[Timing],
        predicted: float,
        now: float,
        kind: str,
        route: Route,
    ) -> Flight:
        """Codec step of the rows, then everything down in one copy: patch, stopped, finished, audio per row."""
        if not sequences:
            return Flight([], Arrival({}, self.device), predicted, now, kind, route, timings)
        # Copies: the next step overwrites what the runs put out while the codec still reads.
        parts = [run.outputs["results"][: len(rows)] for run, rows in runs]
        results = parts[0].clone() if len(parts) == 1 else torch.cat(parts)
        order = [row for _, rows in runs for row in rows]
        with self.codec_turn():
            start = self.clock.mark()
            plan = slots_plan(slots[order])
            plan.tensors["results"] = [results]
            run = self.vae.run(plan)
            end = self.clock.mark()
            down = torch.cat([results[:, :-1], run.outputs["audio"][: len(order)]], dim=1)
            arrival = Arrival({"packed": down}, self.device)
        if self._codec_stream is not None:
            results.record_stream(self._codec_stream)
        timings.append(Timing("vae", 0, self._bucket(len(order)), start, end))
        rows = [(sequences[row], sequences[row].segment) for row in order]
        return Flight(rows, arrival, predicted, now, kind, route, timings)

    def outcomes(self, flight: Flight) -> list[Outcome]:
        """Results of a flight that has arrived, as copies."""
        if not flight.rows:
            return []
        shape = self.model.patch_shape
        values = shape[0] * shape[1]
        return [
            Outcome(
                sequence=sequence,
                segment=segment,
                audio=row[values + 2 :].copy(),
                patch=row[:values].reshape(shape).copy(),
                stopped=bool(row[values]),
                finished=bool(row[values + 1]),
            )
            for (sequence, segment), row in zip(flight.rows, flight.arrival.read()["packed"], strict=True)
        ]

    # Parts of a prefill

    def _reset_codec(self, sequences: Sequence[SpeechSequence]) -> None:
        """The codec's memory of new streams: silence, or the end of the clip that they continue, decoded unheard."""
        if not sequences:
            return
        with self.codec_turn():
            slots = upload({"slots": slots_of(sequences)}, self.device)["slots"]
            self.state["vae"].index_fill_(0, slots, 0.0)
            for turn in range(max(len(sequence.prompt.primed) for sequence in sequences)):
                group = [sequence for sequence in sequences if turn < len(sequence.prompt.primed)]
                plan = slots_plan(slots_of(group))
                plan.arrays["results"] = emitted(np.stack([sequence.prompt.primed[turn] for sequence in group]))
                self.vae.run(plan)

    def _backbone(
        self, chunks: Sequence[tuple[PrefillChunk, SpeechSequence]], riders: Sequence[SpeechSequence]
    ) -> Tensor:
        """Conditioning [riders + prompts that end, width]."""
        plan, batch_arrays, max_q, max_k = ragged_plan(chunks, self.page_size, self.model.patch_shape)
        return self.ragged(plan | batch_arrays | {"riders": slots_of(riders)}, plan.keys(), max_q, max_k)

    def _replay_prompts(self, chunks: Sequence[tuple[PrefillChunk, SpeechSequence]], needs: Capacity) -> Tensor:
        """Conditioning of the prompts that end, in the leading rows."""
        inputs, batch, _, _ = ragged_plan(chunks, self.page_size, self.model.patch_shape)
        arrays = inputs | {"slot_mapping": batch["slot_mapping"], "cu_seqlens": batch["cu_seqlens_q"]}
        return self.prefill.run(prefill_plan(arrays, needs)).outputs["conditioning"]

    def ragged(self, arrays: Mapping[str, np.ndarray], inputs: Iterable[str], max_q: int, max_k: int) -> Tensor:
        """The model's pass over these arrays; `inputs` names those that are its own."""
        device = upload(arrays, self.device)
        batch = PagedBatch(
            caches=self.caches,
            page_size=self.page_size,
            slot_mapping=device["slot_mapping"],
            num_decode_rows=0,
            cu_seqlens_q=device["cu_seqlens_q"],
            cu_seqlens_k=device["cu_seqlens_k"],
            key_rows=device.get("key_rows"),
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
        )
        plan = {name: device[name] for name in inputs}
        if len(device["riders"]):
            return self.model.mixed(plan, batch, self.state, device["riders"])
        return self.model.prefill(plan, batch)

    def _seat(self, sequences: Sequence[SpeechSequence]) -> None:
        """Writes the slots' rows of streams whose prompt is in the cache; their first patch comes next."""
        if not sequences:
            return
        arrays = seat_arrays(sequences, self._max_pages, self.model.patch_shape)
        device = upload(arrays, self.device)
        slots = device.pop("slots")
        for name, values in device.items():
            table = self.state[name]
            table.index_copy_(0, slots, values.to(table.dtype))

    def _bucket(self, rows: int) -> int:
        return next((bucket for bucket in self.buckets if bucket >= rows), rows)


def emitted(patches: np.ndarray) -> np.ndarray:
    """Results of steps that put out these patches float32 [n, frames, channels] and went on."""
    flags = np.array([name == "emitted" for name in RESULT_FLAGS], dtype=np.float32)
    return np.hstack([patches.reshape(len(patches), -1), np.tile(flags, (len(patches), 1))])


def consecutive(x: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Ascending rows of x, as one view where they have no gaps: each view is a copy to launch."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return [x[rows[0] : rows[-1] + 1]]
    return [x[row : row + 1] for row in rows]


def prefill_ladder(device: str, most: int) -> tuple[list[Capacity], list[Capacity]]:
    """Capacities of recorded prefills of at most `most` tokens, and those of them to record before readiness."""

    def rungs(tokens: Sequence[int], *, audio: bool) -> list[Capacity]:
        sizes = sorted({min(size, most) for size in tokens})
        return [{"tokens": n, "audio": n if audio else 0, "sequences": min(n, _PREFILL_SEQUENCES)} for n in sizes]

    ladder = [rung for audio in (False, True) for rung in rungs(_PREFILL_TOKENS[device], audio=audio)]
    text, clips = _HOT_PREFILLS[device]
    return ladder, [*rungs(text, audio=False), *rungs(clips, audio=True)]


def prefill_plan(arrays: dict[str, np.ndarray], needs: Capacity) -> Plan:
    return Plan(arrays, needs, fills={"patch_index": -1, "cu_seqlens": needs["tokens"]})
