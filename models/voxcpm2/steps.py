"""The captured computations of VoxCPM2: the prefill, its tail, the decode step and the codec's step.

All but the prefill have slot state in and slot state out; the tables are described at models.protocol.SpeechModel. A
step may have more rows than streams: padding rows use slot 0, and a stream that has ended may appear once more. Both
are inactive, so everything that they write goes to scratch or repeats the old values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, BufferSpec
from models.layers.adapters import Lora, LoraBank
from models.layers.kv_cache import Caches, PagedBatch
from models.layers.lora import LoraRows, num_tiles
from models.layers.random import Noise
from models.protocol import RESULT_FLAGS, State
from models.voxcpm2.audio_vae import CodecDecoder
from models.voxcpm2.network import FlowSolver, VoxCPM2Network
from models.voxcpm2.rows import make_patch, step_inputs
from models.voxcpm2.vae_layers import Streams


def lora_specs(bank: LoraBank | None, units: int) -> dict[str, BufferSpec]:
    """Buffers of a step that runs with adapters, for `units` rows or prompt positions."""
    if bank is None:
        return {}
    return {
        "lora_slots": BufferSpec((units,), torch.int32),
        "lora_order": BufferSpec((units,), torch.int32),
        "lora_tiles": BufferSpec((num_tiles(units, bank.num_slots), 3), torch.int32),
    }


def lora_of(bank: LoraBank | None, buffers: Mapping[str, Tensor], *, in_order: bool = False) -> Lora | None:
    """in_order: the units of the batch are sorted by adapter."""
    if bank is None:
        return None
    return Lora(bank, LoraRows(buffers["lora_slots"], buffers["lora_order"], buffers["lora_tiles"], in_order))


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """The whole step: last patch -> LocEnc, TSLM, FSQ, RALM -> stop, flow solve -> next patch. A first patch is made of
    the prompt's hidden vectors, in a row whose backbone computes nothing of use."""

    network: VoxCPM2Network
    solver: FlowSolver
    noise: Noise
    state: State
    caches: Caches
    page_size: int
    bank: LoraBank | None = None

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        return {"slots": BufferSpec((bucket["rows"],), torch.int64), **lora_specs(self.bank, bucket["rows"])}

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        slots, lora = buffers["slots"], lora_of(self.bank, buffers, in_order=True)
        rows = step_inputs(slots, self.network, self.state, self.page_size)
        batch = PagedBatch(self.caches, self.page_size, rows.slot_mapping, rows.block_tables, rows.seq_lens)
        embeds = self.network.embed_encoder_tokens(rows.tokens, rows.normed, lora)
        hidden = self.network.audio_backbone(embeds, rows.rotary, batch, lora)
        # A row in step 0 has no patch yet, and goes on from its prompt.
        prompt, first = self.state["conditioning"].index_select(0, slots).chunk(2, dim=-1), (rows.steps == 0)[:, None]
        lm, residual = (torch.where(first, *pair) for pair in zip(prompt, hidden, strict=True))
        noise = self.noise(rows.seeds, rows.steps)
        return {"results": make_patch(slots, self.network, self.solver, self.state, noise, lm, residual, lora)}


@dataclass(frozen=True, eq=False)
class PrefillStep:
    """Chunks of prompts, packed, with cached context or without. Attention reads the pages of each prompt through its
    slot's block table, and its length on the device. Padded rows belong to no sequence and write to the scratch page;
    padded sequences have the scratch slot and no keys. prefill: of models.protocol.SpeechModel."""

    prefill: Callable[[Mapping[str, Tensor], PagedBatch, LoraBank | None], Tensor]
    state: State
    caches: Caches
    page_size: int
    patch_shape: tuple[int, int]
    bank: LoraBank | None = None

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        tokens, sequences = bucket["tokens"], bucket["sequences"]
        return {
            "token_ids": BufferSpec((tokens,), torch.int64),
            "positions": BufferSpec((tokens,), torch.int64),
            "patch_index": BufferSpec((tokens,), torch.int64),
            "patches": BufferSpec((bucket["audio"], *self.patch_shape), torch.float32),
            "slot_mapping": BufferSpec((tokens,), torch.int64),
            "cu_seqlens": BufferSpec((sequences + 1,), torch.int32),
            "slots": BufferSpec((sequences,), torch.int64),
            "seq_lens": BufferSpec((sequences,), torch.int32),
            "last": BufferSpec((sequences,), torch.int64),
            **lora_specs(self.bank, tokens),
        }

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        tables = self.state["block_table"].index_select(0, buffers["slots"])
        batch = PagedBatch(
            self.caches,
            self.page_size,
            buffers["slot_mapping"],
            cu_seqlens_q=buffers["cu_seqlens"],
            prefill_tables=tables,
            prefill_lens=buffers["seq_lens"],
        )
        return {"conditioning": self.prefill(buffers, batch, self.bank)}


@dataclass(frozen=True, eq=False)
class Tail:
    """Hidden vectors of a backbone pass -> the rows' next patches."""

    network: VoxCPM2Network
    solver: FlowSolver
    noise: Noise
    state: State
    bank: LoraBank | None = None

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        return {"slots": BufferSpec((bucket["rows"],), torch.int64), **lora_specs(self.bank, bucket["rows"])}

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        slots, lora = buffers["slots"], lora_of(self.bank, buffers, in_order=True)
        lm, residual = self.state["conditioning"].index_select(0, slots).chunk(2, dim=-1)
        noise = self.noise(self.state["seed"].index_select(0, slots), self.state["step"].index_select(0, slots))
        return {"results": make_patch(slots, self.network, self.solver, self.state, noise, lm, residual, lora)}


@dataclass(frozen=True, eq=False)
class VAEStep:
    """Emitted patches -> the next samples of their streams."""

    decoder: CodecDecoder
    state: State
    patch_shape: tuple[int, int]

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        rows = bucket["rows"]
        return {
            "slots": BufferSpec((rows,), torch.int64),
            "results": BufferSpec((rows, prod(self.patch_shape) + len(RESULT_FLAGS)), torch.float32),
        }

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        results = buffers["results"]
        patches, emitted = results[:, : -len(RESULT_FLAGS)], results[:, -1] != 0
        # Rows without a patch run on scratch, so that the state of their stream does not change.
        streams = Streams(self.state["vae"], torch.where(emitted, buffers["slots"], 0))
        audio = self.decoder(patches.unflatten(1, self.patch_shape).transpose(1, 2), streams)[:, 0]
        return {"audio": torch.where(emitted[:, None], audio, 0.0)}
