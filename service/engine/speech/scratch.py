"""Passes of a speech runner over the scratch slot and page, before there are requests: they measure costs and memory,
and compile what may run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from models.protocol import Plan, SpeechModel
from service.engine.speech.costs import CostModel
from service.engine.speech.plans import slots_plan
from service.engine.speech.prefill import Capacity, replayed_prefill
from service.engine.speech.runner import SpeechRunner, prefill_plan
from service.engine.worker import WARM_SEQUENCES, WARM_TOKENS
from service.graphs.buckets import octaves


def calibrate(runner: SpeechRunner, costs: CostModel, buckets: Sequence[int], prompt_lengths: Sequence[int]) -> None:
    """Measures the default solver steps: the first requests are scheduled by numbers, too."""
    steps = runner.model.solver_steps[0]
    for bucket in buckets:
        plan, tail = _rows(bucket), _tail_rows(runner, bucket)
        costs.observe("decode", steps, bucket, _timed(runner, partial(runner.decode[steps].run, plan)))
        costs.observe("tail", steps, bucket, _timed(runner, partial(runner.tail[steps].run, tail)))
        with runner.codec_turn():
            costs.observe("vae", 0, bucket, _timed(runner, partial(runner.vae.run, plan)))
    for length in prompt_lengths:
        costs.observe("prefill", 0, length, _timed(runner, partial(scratch_prefill, runner, [length])))
    for capacity in runner.prefill.recorded:
        kind, size = replayed_prefill(capacity)
        plan = _full_prompt(runner.model, capacity)
        costs.observe(kind, 0, size, _timed(runner, partial(runner.prefill.run, plan)))


def _timed(runner: SpeechRunner, launch: Callable[[], object]) -> float:
    """Seconds of the second run: the first one may compile or allocate."""
    launch()
    start = runner.clock.mark()
    launch()
    end = runner.clock.mark()
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    return runner.clock.seconds(start, end)


def warm_up(runner: SpeechRunner, *, max_rows: int, step_tokens: int) -> None:
    """What may run eagerly: steps and prefills of each octave, prefills with a past, of many prompts and beside decode
    rows. Numbers of solver steps share their kernels."""
    steps = runner.model.solver_steps[0]
    rows = octaves(max_rows)
    for part in (runner.decode[steps], runner.tail[steps], runner.vae):
        part.warm_up({"rows": count} for count in rows)
    for length in octaves(min(step_tokens, WARM_TOKENS)):
        scratch_prefill(runner, [length])
    scratch_prefill(runner, [1, 2], past=runner.page_size)
    scratch_prefill(runner, [1] * WARM_SEQUENCES)
    for count in rows:
        scratch_prefill(runner, [1], riders=count)


def largest_shapes(runner: SpeechRunner, tokens: int, clip_samples: int) -> None:
    """Runs what takes most memory eagerly: the longest prefill, the largest batch of each step, a clip's piece."""
    plan, tail = _rows(runner.buckets[-1]), _tail_rows(runner, runner.buckets[-1])
    scratch_prefill(runner, [tokens])
    steps = runner.model.solver_steps[0]
    runner.decode[steps].run(plan, eager="disabled")
    runner.tail[steps].run(tail, eager="disabled")
    with runner.codec_turn():
        runner.vae.run(plan, eager="disabled")
    clip = torch.zeros(clip_samples, device=runner.device)
    next(iter(runner.model.encode_reference_pieces(clip, "right")))


def scratch_prefill(runner: SpeechRunner, lengths: Sequence[int], *, past: int = 0, riders: int = 0) -> Tensor:
    """Prompts of audio positions alone, the costliest, each behind `past` keys, and decode rows beside them."""
    model, sizes = runner.model, np.array(lengths)
    length = int(sizes.sum())
    inputs: dict[str, np.ndarray] = {
        "token_ids": np.zeros(length, dtype=np.int64),
        "positions": np.arange(length) % model.max_positions,
        "patch_index": np.arange(length),
        "patches": np.zeros((length, *model.patch_shape), dtype=np.float32),
        "last": np.cumsum(sizes) - 1,
    }
    arrays = inputs | {
        "slot_mapping": np.zeros(length, dtype=np.int64),
        "cu_seqlens_q": np.cumsum([0, *sizes], dtype=np.int32),
        "cu_seqlens_k": np.cumsum([0, *(sizes + past)], dtype=np.int32),
        "riders": np.zeros(riders, dtype=np.int64),
    }
    if past:
        arrays["key_rows"] = np.zeros(int((sizes + past).sum()), dtype=np.int64)
    return runner.ragged(arrays, inputs.keys(), max(lengths), max(lengths) + past)


def _rows(rows: int) -> Plan:
    return slots_plan(np.zeros(rows, dtype=np.int64))


def _tail_rows(runner: SpeechRunner, rows: int) -> Plan:
    plan = _rows(rows)
    width = runner.model.conditioning_width
    plan.tensors["conditioning"] = [torch.zeros((rows, width), device=runner.device, dtype=runner.dtype)]
    return plan


def _full_prompt(model: SpeechModel, capacity: Capacity) -> Plan:
    """A prompt that fills a recorded prefill."""
    tokens, audio = capacity["tokens"], capacity["audio"]
    arrays = {
        "positions": np.arange(tokens) % model.max_positions,
        "patch_index": np.where(np.arange(tokens) < audio, np.arange(tokens), -1),
        "cu_seqlens": np.array([0, tokens], dtype=np.int32),
    }
    return prefill_plan(arrays, capacity)
