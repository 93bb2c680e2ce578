"""Decode steps and prefills of a language model, captured as the engine does."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.steps.full_size import captured, drawn
from models.interfaces.capturable import Bucket, Plan
from models.layers.kv_cache import CacheSpec
from models.protocol import Decoder
from service.engine.chat.drafts import Drafting
from service.engine.chat.slot_state import IntColumn, SlotState, allocate_layers
from service.engine.chat.steps import STATE_BUFFERS, DecodeStep, LayersStep, PrefillStep, Sampling, VerifyStep
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner
from service.link.sampling import FloatColumn

CONTEXT = 512
ROOM = 512
"""Number of positions that the timed steps may add."""
MAX_CONTEXT = 32_768
PAGE_SIZE = 16
POOL_BYTES = 16 << 30


def fill(state: SlotState, rows: int) -> None:
    """Slots 1..rows as after a prefill of CONTEXT tokens, pages in a shuffled order."""
    generator = torch.Generator().manual_seed(rows)
    per_row = (CONTEXT + ROOM) // PAGE_SIZE
    pages = torch.randperm(rows * per_row, generator=generator).view(rows, per_row).int() + 1
    state.block_tables[1 : rows + 1, :per_row] = pages.to(state.block_tables.device)
    ints = torch.zeros((rows, len(IntColumn)), dtype=torch.int64)
    ints[:, IntColumn.TOKEN] = torch.randint(0, state.prompt_seen.shape[1], (rows,), generator=generator)
    for column in (IntColumn.LENGTH, IntColumn.POSITION, IntColumn.STATED):
        ints[:, column] = CONTEXT
    ints[:, IntColumn.LIMIT] = MAX_CONTEXT
    ints[:, IntColumn.ACTIVE] = 1
    ints[:, IntColumn.SEED] = torch.arange(rows)
    ints[:, IntColumn.STATE] = torch.arange(1, rows + 1)
    ints[:, IntColumn.SPARE] = torch.arange(rows + 1, 2 * rows + 1)
    state.ints[1 : rows + 1] = ints.to(state.ints.device)
    state.floats[1 : rows + 1 : 2, FloatColumn.TEMPERATURE] = 0.7


def caches_of(specs: list[CacheSpec], rows: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    pages = rows * (CONTEXT + ROOM) // PAGE_SIZE + 1
    return drawn([spec.allocate(pages, PAGE_SIZE, device, torch.bfloat16) for spec in specs])


def states_of(decoder: Decoder, rows: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Two rows of recurrent state for each sequence, behind the scratch row; empty for models without."""
    return drawn(allocate_layers(decoder.state_specs(), 1 + 2 * rows, device))


def captured_decode(
    name: str, decoder: Decoder, rows: int, pool: GraphPool, drafts: int = 0
) -> tuple[GraphRunner, Plan, SlotState]:
    """One captured step of rows in the middle of their answers, with so many drafts by the decoder's own drafter."""
    states, inputs = states_of(decoder, rows, pool.device), decoder.pending_specs(1 + drafts) if drafts else []
    pending = allocate_layers(inputs, rows + 1, pool.device)
    state = SlotState(rows, MAX_CONTEXT // PAGE_SIZE, decoder.vocab_size, pool.device, states, pending, drafts)
    caches = caches_of(decoder.cache_specs(), rows, pool.device)
    drafting = Drafting(decoder, state, caches, PAGE_SIZE, decoder.vocab_size) if drafts else None
    sampling = Sampling(decoder, state, decoder.vocab_size, full=False, drafting=drafting)
    layers = LayersStep(decoder, state, caches, PAGE_SIZE)
    step = VerifyStep(layers, sampling) if drafts else DecodeStep(layers, sampling)
    bucket: Bucket = {"rows": rows, "pages": MAX_CONTEXT // PAGE_SIZE}
    if drafts:
        bucket = {**bucket, "drafts": drafts}
    fill(state, rows)
    runner = captured(name, "verify" if drafts else "decode", step, [bucket], pool)
    return runner, Plan(arrays={"slots": torch.arange(1, rows + 1).numpy()}, required=bucket), state


def captured_prefill(
    name: str, decoder: Decoder, tokens: int, pool: GraphPool, cached: int = 0
) -> tuple[GraphRunner, Plan]:
    """One captured prefill of a text of `tokens` tokens behind `cached` positions, as the engine replays it."""
    device = pool.device
    pages = -(-(cached + tokens) // PAGE_SIZE)
    caches = caches_of(decoder.cache_specs(), -(-pages * PAGE_SIZE // (CONTEXT + ROOM)), device)
    hidden = decoder.embed(torch.randint(0, decoder.vocab_size, (tokens,), device=device))
    required = {"tokens": tokens, "sequences": 1}
    positions = np.arange(cached, cached + tokens)
    arrays: dict[str, np.ndarray] = {
        "positions": np.tile(positions[:, None], (1, decoder.position_axes)),
        "slot_mapping": positions + PAGE_SIZE,
        "cu_seqlens": np.array([0, tokens], dtype=np.int32),
    }
    states = states_of(decoder, 1, device)
    if states:
        rows = (2 if cached else 0, 1, 0, 0)
        arrays |= {buffer: np.array([row]) for buffer, row in zip(STATE_BUFFERS, rows, strict=True)}
    state = SlotState(1, pages, decoder.vocab_size, device, states)
    state.block_tables[1, :pages] = torch.arange(1, pages + 1, dtype=torch.int32, device=device)
    step = PrefillStep(LayersStep(decoder, state, caches, PAGE_SIZE), hidden.dtype, cached=cached > 0)
    if cached:
        arrays |= {"slots": np.array([1]), "seq_lens": np.array([cached + tokens], dtype=np.int32)}
    if decoder.feature_levels:
        required = required | {"levels": 0}
    plan = Plan(arrays, tensors={"hidden": [hidden]}, fills={"cu_seqlens": tokens}, required=required)
    return captured(name, "prefill", step, [required], pool), plan
