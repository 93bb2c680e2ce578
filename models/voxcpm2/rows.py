"""Inputs of a decode row per slot, read from slot state; the tables are described at models.protocol.SpeechModel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from models.layers.op import op
from models.protocol import State
from models.voxcpm2.network import Rotary, VoxCPM2Network


def with_prompt_vectors(
    state: State, slots: Tensor, steps: Tensor, lm: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Hidden vectors [rows, H] each of the rows' next patches: those of the prompt for rows in step 0, which have no
    patch yet, and otherwise lm and residual, computed from the last patch. steps [rows]."""
    first = (steps == 0)[:, None]
    prompt_lm, prompt_residual = state["conditioning"].index_select(0, slots).chunk(2, dim=-1)
    return torch.where(first, prompt_lm, lm), torch.where(first, prompt_residual, residual)


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
