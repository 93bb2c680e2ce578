"""Runs of a speech runner's steps over the scratch slot and page at start: they measure costs and memory, and compile
the kernels of eager runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, Plan
from service.engine.core.pages import scratch_chunks
from service.engine.core.readback import mark, seconds_between
from service.engine.core.worker import WARM_SEQUENCES, WARM_TOKENS
from service.engine.speech.costs import Kind, SpeechCosts
from service.engine.speech.graphs import SpeechGraphs
from service.engine.speech.inputs import prefill_plan, slots_plan
from service.engine.speech.runner import SpeechRunner
from service.engine.speech.stream import eager_cost_key, replayed_cost_key
from service.graphs.buckets import powers_of_two
from service.graphs.runner import GraphRunner


def calibrate(runner: SpeechRunner, costs: SpeechCosts, buckets: Sequence[int], prompt_lengths: Sequence[int]) -> None:
    """Measures costs at the default number of solver steps, so that the first requests are scheduled by them. Buckets
    that run in one captured graph, as after a restart, are measured once."""
    solver_steps = runner.solver_steps[0]
    seconds: dict[tuple[Kind, int], float] = {}

    def observe(kind: Kind, steps: int, part: GraphRunner, rows: int) -> None:
        graph = part.graph_for({"rows": rows})
        size = rows if graph is None else graph.bucket["rows"]
        if (kind, size) not in seconds:
            seconds[kind, size] = _timed(runner, partial(part.run, _rows(rows)))
        costs.observe(kind, steps, rows, seconds[kind, size])

    for bucket in buckets:
        observe("decode", solver_steps, runner.decode[solver_steps], bucket)
        observe("tail", solver_steps, runner.tail[solver_steps], bucket)
        with runner.codec.after_steps():
            observe("vae", 0, runner.vae, bucket)
    for length in prompt_lengths:
        kind, size = eager_cost_key(length)
        costs.observe(kind, 0, size, _timed(runner, partial(scratch_prefill, runner, [length])))
    for captured in runner.prefill.captured:
        kind, size = replayed_cost_key(captured)
        plan = _full_prompt(runner, captured)
        costs.observe(kind, 0, size, _timed(runner, partial(runner.prefill.run, plan)))


def _timed(runner: SpeechRunner, launch: Callable[[], object]) -> float:
    """Seconds of the second run, since the first may compile or allocate."""
    launch()
    start = mark(runner.device)
    launch()
    end = mark(runner.device)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    return seconds_between(start, end)


def warm_up(runner: SpeechRunner, *, max_rows: int, step_tokens: int) -> Iterator[None]:
    """Runs what may run eagerly: steps and prefills of each power of two, prefills with cached context and of many
    prompts. Yields after each. All numbers of solver steps use the same kernels."""
    solver_steps = runner.solver_steps[0]
    rows = powers_of_two(max_rows)
    yield from runner.vae.warm_up({"rows": count} for count in rows)
    for graphs in runner.variants:
        for part in (graphs.decode[solver_steps], graphs.tail[solver_steps]):
            yield from part.warm_up({"rows": count} for count in rows)
        yield from graphs.prefill.warm_up(graphs.prefill.bucket_list)
    prompts = [([tokens], 0) for tokens in powers_of_two(min(step_tokens, WARM_TOKENS))]
    prompts += [([1, 2], runner.page_size), ([1] * WARM_SEQUENCES, 0)]
    for graphs in runner.variants:
        for lengths, cached in prompts:
            scratch_prefill(runner, lengths, cached=cached, graphs=graphs)
            yield


def largest_runs(runner: SpeechRunner, tokens: int, reference_samples: int) -> Iterator[Callable[[], object]]:
    """What takes most memory eagerly, but for the codec: the longest prefill, the largest batch of each step, a piece
    of reference audio."""
    graphs = runner.variants[-1]
    yield partial(scratch_prefill, runner, [tokens], graphs=graphs)
    # Fewer tokens may take more memory: attention splits their keys and keeps partial results (paged_prefill).
    for bucket in graphs.prefill.bucket_list:
        yield graphs.prefill.filler_run(bucket)
    for part in (graphs.decode, graphs.tail):
        yield part[runner.solver_steps[0]].filler_run({"rows": runner.buckets[-1]})
    wave = torch.zeros(reference_samples, device=runner.device)
    yield lambda: next(iter(runner.model.encode_reference_pieces(wave, "right")))


def codec_run(runner: SpeechRunner) -> None:
    """The codec's largest eager run, which other steps run beside."""
    with runner.codec.after_steps():
        runner.vae.filler_run({"rows": runner.buckets[-1]})()


def scratch_prefill(
    runner: SpeechRunner, lengths: Sequence[int], *, cached: int = 0, graphs: SpeechGraphs | None = None
) -> Tensor:
    """A prefill of prompts of audio positions only, the costliest, each after `cached` keys. graphs: those whose inputs
    it gets; no position has an adapter."""
    model, length = runner.model, sum(lengths)
    arrays: dict[str, np.ndarray] = {
        "token_ids": np.zeros(length, dtype=np.int64),
        "positions": np.arange(length) % model.max_positions,
        "patch_index": np.arange(length),
        "patches": np.zeros((length, *model.patch_shape), dtype=np.float32),
        "last": np.cumsum(lengths) - 1,
    }
    arrays |= scratch_chunks(lengths, cached, runner.page_size)
    if graphs is not None:
        arrays |= graphs.lora_arrays(np.full(length, -1))
    return runner.eager_pass(arrays)


def _rows(rows: int) -> Plan:
    return slots_plan(np.zeros(rows, dtype=np.int64))


def _full_prompt(runner: SpeechRunner, bucket: Bucket) -> Plan:
    """A prompt that fills a captured prefill, as far as the context allows."""
    index = np.arange(min(bucket["tokens"], runner.model.max_positions))
    arrays = {"positions": index, "patch_index": np.where(index < bucket["audio"], index, -1)}
    arrays |= scratch_chunks([len(index)], 0, runner.page_size)
    return prefill_plan(arrays, np.zeros(1, dtype=np.int64), bucket)
