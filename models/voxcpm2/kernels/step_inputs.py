"""Inputs of VoxCPM2's step from slot state, LocEnc's token rows with the norm of its first layer, and what makes the
token rows of both local stacks.

Reference: models.voxcpm2.rows.step_inputs. Every operation is rounded to the dtype where that rounds it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from models.layers.kernels.launch import launch, release_next, wait_for_previous
from models.layers.norms import RMSNorm
from models.voxcpm2.network import VoxCPM2Network
from models.voxcpm2.rows import StepInputs

PROJECTION_WARPS = 16
"""A program of these keeps a projection's weight, 1024 x 64 in bfloat16, in half of an SM's registers."""


@triton.jit
def projection_of(
    weight_ptr, bias_ptr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Weight [BLOCK, BLOCK_C] and bias [BLOCK] of a linear layer from CHANNELS to WIDTH."""
    n, c = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_C)[None, :]
    weight = tl.load(weight_ptr + n * CHANNELS + c, mask=(n < WIDTH) & (c < CHANNELS), other=0.0)
    n = tl.arange(0, BLOCK)
    return weight, tl.load(bias_ptr + n, mask=n < WIDTH, other=0.0)


@triton.jit
def projected(x, weight, bias, kind: tl.constexpr):
    """The layer of x [BLOCK_C] float32 -> float32 [BLOCK], rounded to the dtype."""
    return (tl.sum(weight.to(tl.float32) * x[None, :], 1) + bias.to(tl.float32)).to(kind).to(tl.float32)


@triton.jit
def normed_row(x, norm, eps, WIDTH: tl.constexpr, kind: tl.constexpr):
    """RMSNorm of x float32 [BLOCK]; zero behind WIDTH."""
    rstd = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    return ((x * rstd).to(kind).to(tl.float32) * norm.to(tl.float32)).to(kind)


@triton.jit
def _step_inputs_kernel(
    slots_ptr,
    active_ptr,
    length_ptr,
    seed_ptr,
    step_ptr,
    tables_ptr,
    last_patch_ptr,
    cos_table_ptr,
    sin_table_ptr,
    special_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    slot_mapping_ptr,
    out_tables_ptr,
    seq_lens_ptr,
    cos_ptr,
    sin_ptr,
    seeds_ptr,
    steps_ptr,
    tokens_ptr,
    normed_ptr,
    max_pages,
    eps,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    FRAMES: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one token of one row. That of the special token reads the row's state as well, and advances it."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1)
    kind = tokens_ptr.dtype.element_ty
    n = tl.arange(0, BLOCK)
    here = n < WIDTH
    norm = tl.load(norm_ptr + n, mask=here, other=0.0)
    if token == 0:
        x = tl.load(special_ptr + n, mask=here, other=0.0).to(tl.float32)
        release_next(PDL)
        wait_for_previous(PDL)
        slot = tl.load(slots_ptr + row)
        step = tl.load(step_ptr + slot)
        # In step 0 there is no patch to embed yet.
        active = tl.load(active_ptr + slot) & (step > 0)
        length = tl.load(length_ptr + slot)
        tl.store(seeds_ptr + row, tl.load(seed_ptr + slot))
        tl.store(steps_ptr + row, step)
        position = tl.where(active, length, 0)
        table = tables_ptr + slot * max_pages
        page = tl.load(table + position // PAGE).to(tl.int64)
        tl.store(slot_mapping_ptr + row, tl.where(active, page * PAGE + position % PAGE, 0))
        tl.store(seq_lens_ptr + row, tl.where(active, position + 1, 0))
        for first in range(0, max_pages, BLOCK_PAGES):
            column = first + tl.arange(0, BLOCK_PAGES)
            in_table = column < max_pages
            pages = tl.load(table + column, mask=in_table, other=0)
            tl.store(out_tables_ptr + row * max_pages + column, pages, mask=in_table)
        d = tl.arange(0, BLOCK_HALF)
        wide = d < HALF
        angle = position.to(tl.int64) * HALF + d
        tl.store(cos_ptr + row * HALF + d, tl.load(cos_table_ptr + angle, mask=wide, other=0.0), mask=wide)
        tl.store(sin_ptr + row * HALF + d, tl.load(sin_table_ptr + angle, mask=wide, other=0.0), mask=wide)
        # No thread may still be about to read the length.
        tl.debug_barrier()
        tl.store(length_ptr + slot, length + 1, mask=active)
    else:
        release_next(PDL)
        wait_for_previous(PDL)
        # Nothing runs before a step for a weight to come beside.
        weight, bias = projection_of(weight_ptr, bias_ptr, WIDTH, CHANNELS, BLOCK, BLOCK_C)
        slot = tl.load(slots_ptr + row)
        c = tl.arange(0, BLOCK_C)
        frame = last_patch_ptr + (slot * FRAMES + token - 1) * CHANNELS + c
        x = projected(tl.load(frame, mask=c < CHANNELS, other=0.0).to(tl.float32), weight, bias, kind)
    place = (row * (1 + FRAMES) + token) * WIDTH + n
    tl.store(tokens_ptr + place, x.to(kind), mask=here)
    tl.store(normed_ptr + place, normed_row(x, norm, eps, WIDTH, kind), mask=here)


def step_inputs(slots: Tensor, network: VoxCPM2Network, state: Mapping[str, Tensor], page_size: int) -> StepInputs:
    """models.voxcpm2.rows.step_inputs."""
    encoder = network.feat_encoder
    rotary, special = (network.cos, network.sin), encoder.special_token.view(-1)
    norm = encoder.encoder.first_norm
    return StepInputs(*launch_step_inputs(state, slots, page_size, rotary, special, encoder.in_proj, norm))


def launch_step_inputs(
    state: Mapping[str, Tensor],
    slots: Tensor,
    page_size: int,
    rotary: tuple[Tensor, Tensor],
    special: Tensor,
    projection: nn.Linear,
    norm: RMSNorm,
) -> tuple[Tensor, ...]:
    """The fields of models.voxcpm2.rows.StepInputs, for slots int64 [rows]; advances the lengths. rotary: tables
    float32 [positions, head_dim / 2]; special [h]; projection from D to h channels."""
    rows, device = slots.shape[0], slots.device
    frames, channels = state["last_patch"].shape[1:]
    width, half, pages = special.shape[0], rotary[0].shape[1], state["block_table"].shape[1]
    tokens, normed = (
        torch.empty((rows, 1 + frames, width), device=device, dtype=state["last_patch"].dtype) for _ in range(2)
    )
    cos, sin = (torch.empty((rows, half), device=device) for _ in range(2))
    slot_mapping, seeds = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    seq_lens, steps = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    tables = torch.empty((rows, pages), dtype=torch.int32, device=device)
    made = (slot_mapping, tables, seq_lens, cos, sin, seeds, steps, tokens, normed)
    launch(
        _step_inputs_kernel,
        (rows, 1 + frames),
        slots,
        state["active"],
        state["length"],
        state["seed"],
        state["step"],
        state["block_table"],
        state["last_patch"],
        *rotary,
        special,
        projection.weight,
        projection.bias,
        norm.weight,
        *made,
        pages,
        norm.eps,
        PAGE=page_size,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_PAGES=min(1024, triton.next_power_of_2(pages)),
        FRAMES=frames,
        CHANNELS=channels,
        WIDTH=width,
        BLOCK_C=triton.next_power_of_2(channels),
        BLOCK=triton.next_power_of_2(width),
        num_warps=PROJECTION_WARPS,
    )
    return made
