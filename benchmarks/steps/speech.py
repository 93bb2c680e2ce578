"""Decode steps of VoxCPM2, captured as the engine does, with adapters and without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from benchmarks.steps.full_size import captured, drawn
from models.interfaces.capturable import Plan
from models.layers.adapters import LoraBank, LoraLayout
from models.layers.lora import rows_arrays
from models.protocol import SpeechModel
from service.engine.core.pages import pages_for
from service.engine.speech.runner import slot_state
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner

MODEL = "voxcpm2"
CONTEXT = 256
PAGE_SIZE = 16
ADAPTER_SLOTS = 32
LORA_GROUPS = ("lm", "dit")
"""The layers that the published fine-tuning changes by default."""


def live_state(model: SpeechModel, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Slots 1..rows in the middle of an utterance, each with pages of its own."""
    pages = pages_for(model.max_positions, PAGE_SIZE)
    state = slot_state(model, rows, pages, device)
    used = pages_for(CONTEXT + 512, PAGE_SIZE)
    for slot in range(1, rows + 1):
        first = 1 + (slot - 1) * used
        state["block_table"][slot, :used] = torch.arange(first, first + used, dtype=torch.int32, device=device)
    state["last_patch"].normal_()
    state["length"].fill_(CONTEXT)
    state["step"].fill_(CONTEXT)
    state["active"].fill_(True)
    state["active"][0] = False
    state["cfg"].fill_(2.0)
    state["temperature"].fill_(1.0)
    state["seed"].copy_(torch.arange(rows + 1, device=device))
    state["min_patches"].fill_(1 << 20)
    state["max_patches"].fill_(1 << 20)
    return state


def caches_of(model: SpeechModel, rows: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    pages = 1 + rows * pages_for(CONTEXT + 512, PAGE_SIZE)
    return drawn([spec.allocate(pages, PAGE_SIZE, device, torch.bfloat16) for spec in model.cache_specs()])


def captured_decode(
    model: SpeechModel, bucket: int, pool: GraphPool, bank: LoraBank | None = None
) -> tuple[GraphRunner, Plan, dict[str, torch.Tensor]]:
    """One captured step of streams in the middle of their utterances. With a bank the plan needs the rows' adapters
    (with_adapters)."""
    state, caches = live_state(model, bucket, pool.device), caches_of(model, bucket, pool.device)
    step = model.decode_step(model.solver_steps[0], state, caches, PAGE_SIZE, bank)
    plan = Plan(arrays={"slots": np.arange(1, bucket + 1, dtype=np.int64)}, required={"rows": bucket})
    return captured(MODEL, "decode", step, [plan.required], pool), plan, state


def filled_bank(model: SpeechModel, rank: int, device: torch.device) -> LoraBank:
    layout = LoraLayout(model.lora_places(), LORA_GROUPS, rank)
    bank = LoraBank(layout, ADAPTER_SLOTS, device, torch.bfloat16)
    bank.table.normal_(std=0.01)
    return bank


def with_adapters(plan: Plan, distinct: int) -> Plan:
    """A decode step's plan whose rows have `distinct` adapters, sorted as in a step, each of about as many rows."""
    rows = plan.required["rows"]
    adapters = np.sort(np.arange(rows) % distinct) if distinct else np.full(rows, -1)
    arrays = rows_arrays(adapters, ADAPTER_SLOTS)
    return replace(plan, arrays={**plan.arrays, **{f"lora_{name}": array for name, array in arrays.items()}})
