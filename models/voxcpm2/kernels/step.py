"""VoxCPM2's step around its networks: inputs from slot state, the token rows of both local stacks with the norm that
their first layers begin with, the Euler steps between LocDiT's evaluations, and stop, patch and state at the end.

References: models.voxcpm2.rows.step_inputs and models.voxcpm2.rows.make_patch. Every operation is rounded to the dtype
where these round it. Halves of a guided batch lie together: sequence 2 i is stream i's conditional one, 2 i + 1 its
unconditional one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from models.layers.adapters import Lora
from models.layers.kernels.launch import launch, release_next, wait_for_previous
from models.layers.norms import RMSNorm
from models.protocol import State
from models.voxcpm2.network import FlowSolver, VoxCPM2Network, project
from models.voxcpm2.rows import StepInputs

_PROJECTION_WARPS = 16
"""A program of these keeps a projection's weight, 1024 x 64 in bfloat16, in half of an SM's registers."""


@triton.jit
def _projection_of(
    weight_ptr, bias_ptr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Weight [BLOCK, BLOCK_C] and bias [BLOCK] of a linear layer from CHANNELS to WIDTH."""
    n, c = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_C)[None, :]
    weight = tl.load(weight_ptr + n * CHANNELS + c, mask=(n < WIDTH) & (c < CHANNELS), other=0.0)
    n = tl.arange(0, BLOCK)
    return weight, tl.load(bias_ptr + n, mask=n < WIDTH, other=0.0)


@triton.jit
def _projected(x, weight, bias, kind: tl.constexpr):
    """The layer of x [BLOCK_C] float32 -> float32 [BLOCK], rounded to the dtype."""
    return (tl.sum(weight.to(tl.float32) * x[None, :], 1) + bias.to(tl.float32)).to(kind).to(tl.float32)


@triton.jit
def _normed_row(x, norm, eps, WIDTH: tl.constexpr, kind: tl.constexpr):
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
        weight, bias = _projection_of(weight_ptr, bias_ptr, WIDTH, CHANNELS, BLOCK, BLOCK_C)
        slot = tl.load(slots_ptr + row)
        c = tl.arange(0, BLOCK_C)
        frame = last_patch_ptr + (slot * FRAMES + token - 1) * CHANNELS + c
        x = _projected(tl.load(frame, mask=c < CHANNELS, other=0.0).to(tl.float32), weight, bias, kind)
    place = (row * (1 + FRAMES) + token) * WIDTH + n
    tl.store(tokens_ptr + place, x.to(kind), mask=here)
    tl.store(normed_ptr + place, _normed_row(x, norm, eps, WIDTH, kind), mask=here)


def step_inputs(slots: Tensor, network: VoxCPM2Network, state: State, page_size: int) -> StepInputs:
    """models.voxcpm2.rows.step_inputs."""
    encoder, tables = network.feat_encoder, (network.cos, network.sin)
    special, projection, norm = encoder.special_token.view(-1), encoder.in_proj, encoder.encoder.first_norm
    rows, device = slots.shape[0], slots.device
    frames, channels = state["last_patch"].shape[1:]
    width, half, pages = special.shape[0], network.cos.shape[1], state["block_table"].shape[1]
    tokens, normed = (
        torch.empty((rows, 1 + frames, width), device=device, dtype=state["last_patch"].dtype) for _ in range(2)
    )
    cos, sin = (torch.empty((rows, half), device=device) for _ in range(2))
    slot_mapping, seeds = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    seq_lens, steps = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    block_tables = torch.empty((rows, pages), dtype=torch.int32, device=device)
    made = (slot_mapping, block_tables, seq_lens, cos, sin, seeds, steps, tokens, normed)
    launch(
        _step_inputs_kernel,
        (rows, 1 + frames),
        slots,
        *(state[name] for name in ("active", "length", "seed", "step", "block_table", "last_patch")),
        *tables,
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
        num_warps=_PROJECTION_WARPS,
    )
    return StepInputs(*made)


@triton.jit
def _guided(x, a, b, all_a, all_b, cfg, width, kind: tl.constexpr):
    """models.voxcpm2.solver.guided_euler_step of some values x with velocities a and b; all_a and all_b are those of
    the whole patch. cfg is rounded to the dtype."""
    dot = tl.sum((all_a * all_b).to(kind).to(tl.float32), 0).to(kind).to(tl.float32)
    square = tl.sum((all_b * all_b).to(kind).to(tl.float32), 0).to(kind).to(tl.float32)
    scale = tl.div_rn(dot, (square + 1e-8).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    scaled = (b * scale).to(kind).to(tl.float32)
    guided = (cfg * (a - scaled).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    step = (width * (scaled + guided).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    return (x - step).to(kind).to(tl.float32)


@triton.jit
def _flow_tokens_kernel(
    slots_ptr,
    mu_lm_ptr,
    mu_res_ptr,
    time_ptr,
    last_patch_ptr,
    noise_ptr,
    temperature_ptr,
    cfg_ptr,
    velocity_ptr,
    x_ptr,
    cond_weight_ptr,
    cond_bias_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    out_ptr,
    tokens_ptr,
    normed_ptr,
    width,
    eps,
    START: tl.constexpr,
    FRAMES: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one token of both halves of a stream. START: every token, of noise; otherwise those that change, the
    time's and those of the patch after one more Euler step."""
    stream = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1)
    if not START:
        token = tl.where(token == 0, 2, 2 + FRAMES + token)
    kind = tokens_ptr.dtype.element_ty
    n = tl.arange(0, BLOCK)
    here = n < WIDTH
    norm = tl.load(norm_ptr + n, mask=here, other=0.0)
    if token < 3:
        release_next(PDL)
        wait_for_previous(PDL)
        row = time_ptr
        if START:
            if token == 0:
                row = mu_lm_ptr + stream * WIDTH
            if token == 1:
                row = mu_res_ptr + stream * WIDTH
        y = tl.load(row + n, mask=here, other=0.0).to(tl.float32)
    else:
        c = tl.arange(0, BLOCK_C)
        real = c < CHANNELS
        previous = token < 3 + FRAMES
        if previous:
            weight, bias = _projection_of(cond_weight_ptr, cond_bias_ptr, WIDTH, CHANNELS, BLOCK, BLOCK_C)
        else:
            weight, bias = _projection_of(weight_ptr, bias_ptr, WIDTH, CHANNELS, BLOCK, BLOCK_C)
        release_next(PDL)
        wait_for_previous(PDL)
        slot = tl.load(slots_ptr + stream)
        if previous:
            x = tl.load(last_patch_ptr + (slot * FRAMES + token - 3) * CHANNELS + c, mask=real, other=0.0)
            x = x.to(tl.float32)
        else:
            frame = token - 3 - FRAMES
            own = (stream * FRAMES + frame) * CHANNELS + c
            if START:
                noise = tl.load(noise_ptr + (stream * CHANNELS + c) * FRAMES + frame, mask=real, other=0.0)
                temperature = tl.load(temperature_ptr + slot).to(kind).to(tl.float32)
                x = (noise.to(kind).to(tl.float32) * temperature).to(kind).to(tl.float32)
            else:
                p = tl.arange(0, BLOCK_P)
                in_patch = p < FRAMES * CHANNELS
                a_ptr = velocity_ptr + 2 * stream * FRAMES * CHANNELS
                b_ptr = a_ptr + FRAMES * CHANNELS
                x = _guided(
                    tl.load(x_ptr + own, mask=real, other=0.0).to(tl.float32),
                    tl.load(a_ptr + frame * CHANNELS + c, mask=real, other=0.0).to(tl.float32),
                    tl.load(b_ptr + frame * CHANNELS + c, mask=real, other=0.0).to(tl.float32),
                    tl.load(a_ptr + p, mask=in_patch, other=0.0).to(tl.float32),
                    tl.load(b_ptr + p, mask=in_patch, other=0.0).to(tl.float32),
                    tl.load(cfg_ptr + slot).to(kind).to(tl.float32),
                    width,
                    kind,
                )
            tl.store(out_ptr + own, x.to(kind), mask=real)
        y = _projected(x, weight, bias, kind)
    LENGTH: tl.constexpr = 3 + 2 * FRAMES
    place = (2 * stream * LENGTH + token) * WIDTH + n
    normed = _normed_row(y, norm, eps, WIDTH, kind)
    tl.store(tokens_ptr + place, y.to(kind), mask=here)
    tl.store(normed_ptr + place, normed, mask=here)
    if START:  # noqa: SIM102 (a constant first: Triton drops the branch)
        if token < 2:
            # The unconditional half has mu = 0.
            y = tl.zeros_like(y)
            normed = tl.zeros_like(normed)
    place += LENGTH * WIDTH
    tl.store(tokens_ptr + place, y.to(kind), mask=here)
    tl.store(normed_ptr + place, normed, mask=here)


class FlowTokens:
    """LocDiT's input through one solve of `slots` int64 [streams]: tokens [2 * streams, 3 + 2 P, h] of [mu_lm, mu_res,
    time, previous patch (P), patch (P)], and the same normed for the first layer."""

    def __init__(
        self, state: State, slots: Tensor, condition_projection: nn.Linear, projection: nn.Linear, norm: RMSNorm
    ) -> None:
        patches, hidden_size = state["last_patch"], projection.out_features
        self._state, self._slots = state, slots
        self._layers = (condition_projection, projection, norm)
        self.x = patches.new_empty((0,))
        """[streams, P, D], where the solve is."""
        self.tokens, self.normed = (
            torch.empty(
                (2 * slots.shape[0], 3 + 2 * patches.shape[1], hidden_size), device=slots.device, dtype=patches.dtype
            )
            for _ in range(2)
        )

    def start(self, noise: Tensor, mu_lm: Tensor, mu_res: Tensor, time: Tensor) -> None:
        """noise float32 [streams, D, P], mu_lm, mu_res [streams, h], time [h]."""
        self._launch(time, (noise.contiguous(), mu_lm.contiguous(), mu_res.contiguous()), None, 0.0)

    def advance(self, velocity: Tensor, step_size: float, time: Tensor) -> None:
        """An Euler step of this size along velocity [2 * streams, P, D]; time [h] is the one it leads to."""
        self._launch(time, None, velocity, step_size)

    def _launch(
        self, time: Tensor, start: tuple[Tensor, Tensor, Tensor] | None, velocity: Tensor | None, step_size: float
    ) -> None:
        state, (condition, projection, norm) = self._state, self._layers
        streams = self._slots.shape[0]
        frames, channels = state["last_patch"].shape[1:]
        x, out = self.x, torch.empty((streams, frames, channels), device=self.tokens.device, dtype=self.tokens.dtype)
        self.x = out
        noise, mu_lm, mu_res = start if start is not None else (out, out, out)
        launch(
            _flow_tokens_kernel,
            (streams, 3 + 2 * frames if start is not None else 1 + frames),
            self._slots,
            mu_lm,
            mu_res,
            time,
            state["last_patch"],
            noise,
            state["temperature"],
            state["cfg"],
            velocity if velocity is not None else out,
            x if velocity is not None else out,
            condition.weight,
            condition.bias,
            projection.weight,
            projection.bias,
            norm.weight,
            out,
            self.tokens,
            self.normed,
            step_size,
            norm.eps,
            START=start is not None,
            FRAMES=frames,
            CHANNELS=channels,
            WIDTH=projection.out_features,
            BLOCK_C=triton.next_power_of_2(channels),
            BLOCK_P=triton.next_power_of_2(frames * channels),
            BLOCK=triton.next_power_of_2(projection.out_features),
            num_warps=_PROJECTION_WARPS,
        )


@triton.jit
def _settle_kernel(
    slots_ptr,
    active_ptr,
    step_ptr,
    min_patches_ptr,
    max_patches_ptr,
    cfg_ptr,
    last_patch_ptr,
    x_ptr,
    velocity_ptr,
    hidden_ptr,
    stop_ptr,
    results_ptr,
    width,
    SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row. The last Euler step, the stop head, slot state and results."""
    row = tl.program_id(0).to(tl.int64)
    kind = x_ptr.dtype.element_ty
    n = tl.arange(0, BLOCK)
    here = n < INPUTS
    go_weight = tl.load(stop_ptr + n, mask=here, other=0.0).to(tl.float32)
    stop_weight = tl.load(stop_ptr + INPUTS + n, mask=here, other=0.0).to(tl.float32)
    release_next(PDL)
    wait_for_previous(PDL)
    slot = tl.load(slots_ptr + row)
    active = tl.load(active_ptr + slot)
    step = tl.load(step_ptr + slot)
    p = tl.arange(0, BLOCK_P)
    in_patch = p < SIZE
    a = tl.load(velocity_ptr + 2 * row * SIZE + p, mask=in_patch, other=0.0).to(tl.float32)
    b = tl.load(velocity_ptr + (2 * row + 1) * SIZE + p, mask=in_patch, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * SIZE + p, mask=in_patch, other=0.0).to(tl.float32)
    x = _guided(x, a, b, a, b, tl.load(cfg_ptr + slot).to(kind).to(tl.float32), width, kind)
    hidden = tl.load(hidden_ptr + row * INPUTS + n, mask=here, other=0.0).to(tl.float32)
    hidden = (hidden * tl.sigmoid(hidden)).to(kind).to(tl.float32)
    go_on = tl.sum(hidden * go_weight, 0).to(kind).to(tl.float32)
    stop = tl.sum(hidden * stop_weight, 0).to(kind).to(tl.float32)
    # A tie goes on, as argmax has it; so does a stop flag before the least length.
    stopped = active & (stop > go_on) & (step > tl.load(min_patches_ptr + slot))
    finished = stopped | (active & (step + 1 >= tl.load(max_patches_ptr + slot)))
    results = results_ptr + row * (SIZE + 3)
    tl.store(results + p, x, mask=in_patch)
    tl.store(results + SIZE, stopped.to(tl.float32))
    tl.store(results + SIZE + 1, finished.to(tl.float32))
    tl.store(results + SIZE + 2, active.to(tl.float32))
    # No thread may still be about to read the state.
    tl.debug_barrier()
    tl.store(last_patch_ptr + slot * SIZE + p, x.to(kind), mask=in_patch & active)
    tl.store(step_ptr + slot, step + 1, mask=active)
    tl.store(active_ptr + slot, active & (finished == 0), mask=active)


def settle(
    state: State, slots: Tensor, x: Tensor, velocity: Tensor, step_size: float, hidden: Tensor, stop: Tensor
) -> Tensor:
    """The last Euler step, the stop head and the slots' state.

    x [rows, P, D] and its last velocity [2 * rows, P, D]; hidden [rows, H] before the SiLU and the stop head's weight
    [2, H] -> results float32 [rows, P * D + 3], as models.protocol.SpeechModel.decode_step has them.
    """
    rows, size = x.shape[0], x.shape[1] * x.shape[2]
    results = torch.empty((rows, size + 3), device=x.device)
    launch(
        _settle_kernel,
        (rows,),
        slots,
        *(state[name] for name in ("active", "step", "min_patches", "max_patches", "cfg", "last_patch")),
        x,
        velocity,
        hidden,
        stop,
        results,
        step_size,
        SIZE=size,
        BLOCK_P=triton.next_power_of_2(size),
        INPUTS=hidden.shape[1],
        BLOCK=triton.next_power_of_2(hidden.shape[1]),
        num_warps=4,
    )
    return results


def make_patch(
    slots: Tensor,
    network: VoxCPM2Network,
    solver: FlowSolver,
    state: State,
    noise: Tensor,
    lm: Tensor,
    residual: Tensor,
    lora: Lora | None = None,
) -> Tensor:
    """models.voxcpm2.rows.make_patch with one kernel between two evaluations of LocDiT, and one behind the last."""
    dit, times, step_sizes = solver.dit, solver.time_table, solver.schedule.step_sizes
    hidden = project(network.stop_proj, lm)
    flow = FlowTokens(state, slots, dit.cond_proj, dit.in_proj, dit.decoder.first_norm)
    # The two halves of a stream lie side by side here, so that a unit of its adapters is both.
    adapters = None if lora is None else lora.stack("feat_decoder")
    flow.start(noise, *network.condition(lm, residual, lora), times[0])
    for step_size, time in zip(step_sizes[:-1], times[1:], strict=True):
        flow.advance(dit.velocity(flow.tokens, flow.normed, adapters), step_size, time)
    velocity = dit.velocity(flow.tokens, flow.normed, adapters)
    return settle(state, slots, flow.x, velocity, step_sizes[-1], hidden, network.stop_head.weight)
