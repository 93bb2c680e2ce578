"""What is recorded of VoxCPM2: the prefill of prompts without a past, its tail, the decode step and the codec's step.

All but the prefill have slot state in and slot state out; the tables are described at models.protocol.SpeechModel. A
step is given more rows than it has streams: padding points at slot 0, and a stream that ended may appear once more.
Both are inactive, so everything that they would write goes to scratch or repeats what was there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from models.layers.kv_cache import PagedBatch
from models.layers.random import Noise
from models.protocol import BufferSpec, Capacity
from models.voxcpm2.audio_vae import Decoder
from models.voxcpm2.network import FlowSolver, VoxCPM2Network
from models.voxcpm2.vae_layers import Streams

State = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """Inputs of one decode row per slot, read from slot state; all [rows] but patches and block_tables."""

    active: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    patches: Tensor


def decode_rows(state: State, slots: Tensor, page_size: int) -> DecodeRows:
    """Inactive rows attend to nothing and write the cache's scratch row."""
    active = state["active"].index_select(0, slots)
    length = torch.where(active, state["length"].index_select(0, slots), 0)
    block_tables = state["block_table"].index_select(0, slots)
    page = block_tables.gather(1, (length // page_size).to(torch.int64)[:, None])[:, 0].to(torch.int64)
    return DecodeRows(
        active=active,
        positions=length.to(torch.int64),
        slot_mapping=torch.where(active, page * page_size + length % page_size, 0),
        block_tables=block_tables,
        seq_lens=torch.where(active, length + 1, 0),
        patches=state["last_patch"].index_select(0, slots),
    )


def advance_length(state: State, slots: Tensor, rows: DecodeRows) -> None:
    """The rows' keys are in the cache."""
    length = state["length"].index_select(0, slots)
    state["length"].index_copy_(0, slots, length + rows.active.to(length.dtype))


@dataclass(frozen=True, eq=False)
class PatchMaker:
    """From hidden vectors to the next patch: stop head, noise, flow solve, slot state."""

    network: VoxCPM2Network
    solver: FlowSolver
    noise: Noise

    def __call__(self, state: State, slots: Tensor, lm: Tensor, residual: Tensor) -> dict[str, Tensor]:
        def read(name: str) -> Tensor:
            return state[name].index_select(0, slots)

        active, step, previous = read("active"), read("step"), read("last_patch")
        dtype = previous.dtype
        noise = self.noise(read("seed"), step).to(dtype) * read("temperature").to(dtype)[:, None, None]
        mu = self.network.condition(lm, residual)
        patch = self.solver.solve(noise.transpose(1, 2), mu, previous, read("cfg").to(dtype))

        logits = self.network.stop_logits(lm)
        # A tie goes on, as argmax has it; so does a stop flag before the least length.
        stopped = active & (logits[:, 1] > logits[:, 0]) & (step > read("min_patches"))
        finished = stopped | (active & (step + 1 >= read("max_patches")))
        state["last_patch"].index_copy_(0, slots, torch.where(active[:, None, None], patch, previous))
        state["step"].index_copy_(0, slots, step + active.to(step.dtype))
        state["active"].index_copy_(0, slots, active & ~finished)
        return {"patch": patch, "emitted": active, "stopped": stopped, "finished": finished}


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """The whole step: last patch -> LocEnc, TSLM, FSQ, RALM -> stop, flow solve -> next patch."""

    name: str
    network: VoxCPM2Network
    make_patch: PatchMaker
    state: State
    caches: Sequence[Mapping[str, Tensor]]
    page_size: int

    def buffer_specs(self, capacity: Capacity) -> dict[str, BufferSpec]:
        return {"slots": BufferSpec((capacity["rows"],), torch.int64)}

    def forward(self, buffers: Mapping[str, Tensor], capacity: Capacity) -> dict[str, Tensor]:
        slots = buffers["slots"]
        rows = decode_rows(self.state, slots, self.page_size)
        batch = PagedBatch(
            caches=self.caches,
            page_size=self.page_size,
            slot_mapping=rows.slot_mapping,
            num_decode_rows=capacity["rows"],
            block_tables=rows.block_tables,
            seq_lens=rows.seq_lens,
        )
        embeds = self.network.embed_patches(rows.patches)
        lm, residual = self.network.audio_backbone(embeds, rows.positions, batch)
        advance_length(self.state, slots, rows)
        return self.make_patch(self.state, slots, lm, residual)


class Prefill(Protocol):
    """models.protocol.SpeechModel.prefill."""

    def __call__(self, plan: Mapping[str, Tensor], batch: PagedBatch) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class PrefillStep:
    """Whole prompts, or their first chunks, packed. Padded rows belong to no sequence and write to the scratch page."""

    name: str
    prefill: Prefill
    caches: Sequence[Mapping[str, Tensor]]
    page_size: int
    patch_shape: tuple[int, int]

    def buffer_specs(self, capacity: Capacity) -> dict[str, BufferSpec]:
        tokens, sequences = capacity["tokens"], capacity["sequences"]
        return {
            "token_ids": BufferSpec((tokens,), torch.int64),
            "positions": BufferSpec((tokens,), torch.int64),
            "patch_index": BufferSpec((tokens,), torch.int64),
            "patches": BufferSpec((capacity["audio"], *self.patch_shape), torch.float32),
            "slot_mapping": BufferSpec((tokens,), torch.int64),
            "cu_seqlens": BufferSpec((sequences + 1,), torch.int32),
            "last": BufferSpec((sequences,), torch.int64),
        }

    def forward(self, buffers: Mapping[str, Tensor], capacity: Capacity) -> dict[str, Tensor]:
        batch = PagedBatch(
            caches=self.caches,
            page_size=self.page_size,
            slot_mapping=buffers["slot_mapping"],
            num_decode_rows=0,
            cu_seqlens_q=buffers["cu_seqlens"],
            cu_seqlens_k=buffers["cu_seqlens"],
            max_seqlen_q=capacity["tokens"],
            max_seqlen_k=capacity["tokens"],
        )
        return {"conditioning": self.prefill(buffers, batch)}


@dataclass(frozen=True, eq=False)
class Tail:
    """Hidden vectors of a prefill -> the rows' next patches."""

    name: str
    make_patch: PatchMaker
    state: State
    conditioning_width: int
    dtype: torch.dtype

    def buffer_specs(self, capacity: Capacity) -> dict[str, BufferSpec]:
        rows = capacity["rows"]
        return {
            "slots": BufferSpec((rows,), torch.int64),
            "conditioning": BufferSpec((rows, self.conditioning_width), self.dtype),
        }

    def forward(self, buffers: Mapping[str, Tensor], capacity: Capacity) -> dict[str, Tensor]:
        lm, residual = buffers["conditioning"].chunk(2, dim=-1)
        return self.make_patch(self.state, buffers["slots"], lm, residual)


@dataclass(frozen=True, eq=False)
class VAEStep:
    """Emitted patches -> the next samples of their streams."""

    name: str
    decoder: Decoder
    state: State
    patch_shape: tuple[int, int]

    def buffer_specs(self, capacity: Capacity) -> dict[str, BufferSpec]:
        rows = capacity["rows"]
        return {
            "slots": BufferSpec((rows,), torch.int64),
            "patches": BufferSpec((rows, *self.patch_shape), torch.float32),
            "emitted": BufferSpec((rows,), torch.bool),
        }

    def forward(self, buffers: Mapping[str, Tensor], capacity: Capacity) -> dict[str, Tensor]:
        emitted = buffers["emitted"]
        # Rows without a patch run on scratch, so that their stream's memory stays.
        streams = Streams(self.state["vae"], torch.where(emitted, buffers["slots"], 0))
        audio = self.decoder(buffers["patches"].transpose(1, 2), streams)[:, 0]
        return {"audio": torch.where(emitted[:, None], audio, 0.0)}
