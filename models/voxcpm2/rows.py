"""From slot state to a row's inputs, and from its hidden vectors to the next patch: noise, flow solve, stop head, slot
state. The tables are described at models.protocol.SpeechModel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from models.layers.adapters import Lora
from models.layers.op import op
from models.protocol import State
from models.voxcpm2.network import FlowSolver, Rotary, VoxCPM2Network


class StepInputs(NamedTuple):
    """Everything that a decode step reads from slot state before its networks run.

    slot_mapping int64 [rows], block_tables int32 [rows, pages], seq_lens int32 [rows]; cos and sin float32 [rows,
    head_dim / 2] at the rows' positions; seeds int64 [rows], steps int32 [rows]; LocEnc's tokens of the last patches
    [rows, 1 + P, h], and the same after its first norm.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cos: Tensor
    sin: Tensor
    seeds: Tensor
    steps: Tensor
    tokens: Tensor
    normed: Tensor

    @property
    def rotary(self) -> Rotary:
        return self.cos, self.sin


@op(cuda="models.voxcpm2.kernels.step:step_inputs")
def step_inputs(slots: Tensor, network: VoxCPM2Network, state: State, page_size: int) -> StepInputs:
    """Inputs of the slots' next step, for which their lengths advance. Rows without a last patch to embed (inactive
    ones, and those whose first patch comes now) attend to nothing and write the cache's scratch slot."""
    encoder, lengths = network.feat_encoder, state["length"].index_select(0, slots)
    active = state["active"].index_select(0, slots) & (state["step"].index_select(0, slots) > 0)
    positions = torch.where(active, lengths, 0)
    tables = state["block_table"].index_select(0, slots)
    page = tables.gather(1, (positions // page_size).to(torch.int64)[:, None])[:, 0].to(torch.int64)
    tokens = encoder.tokens(state["last_patch"].index_select(0, slots))
    state["length"].index_copy_(0, slots, lengths + active.to(lengths.dtype))
    return StepInputs(
        torch.where(active, page * page_size + positions % page_size, 0),
        tables,
        torch.where(active, positions + 1, 0),
        *network.rotary(positions.to(torch.int64)),
        state["seed"].index_select(0, slots),
        state["step"].index_select(0, slots),
        tokens,
        encoder.encoder.first_norm(tokens),
    )


@op(cuda="models.voxcpm2.kernels.step:make_patch")
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
    """TSLM and RALM of the rows [rows, H] each, and noise float32 [rows, D, P] -> results float32 [rows, P * D + 3], as
    models.protocol.SpeechModel.decode_step has them. Writes last_patch, step and active of the slots, which are ready
    for their next step then."""

    def read(name: str) -> Tensor:
        return state[name].index_select(0, slots)

    active, step, previous = read("active"), read("step"), read("last_patch")
    dtype = previous.dtype
    noise = noise.to(dtype) * read("temperature").to(dtype)[:, None, None]
    mu = torch.stack(network.condition(lm, residual, lora), dim=1)
    patch = solver.solve(noise.transpose(1, 2), mu, previous, read("cfg").to(dtype), lora)

    logits = network.stop_logits(lm)
    # A tie continues, as with argmax; so does a stop flag before the minimum length.
    stopped = active & (logits[:, 1] > logits[:, 0]) & (step > read("min_patches"))
    finished = stopped | (active & (step + 1 >= read("max_patches")))
    state["last_patch"].index_copy_(0, slots, torch.where(active[:, None, None], patch, previous))
    state["step"].index_copy_(0, slots, step + active.to(step.dtype))
    state["active"].index_copy_(0, slots, active & ~finished)
    return torch.cat((patch.flatten(1).float(), torch.stack((stopped, finished, active), dim=1).float()), dim=1)
