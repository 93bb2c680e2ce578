"""The interface between the service and a model family. models/interfaces/capturable.py has what can be captured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn

from models.interfaces.capturable import Bucket, BufferSpec, Capturable, Plan
from models.interfaces.media import MediaItem
from models.layers.adapters import LoraBank, LoraPlace
from models.layers.kv_cache import Caches, CacheSpec, PagedBatch
from models.layers.moe import weight_bytes


class VisionEncoder(Capturable, Protocol):
    """Vision or audio tower with its projector. Output "embeds": [rows, (1 + feature_levels) * hidden_size of the
    decoder], item after item; in each row the features follow the embedding (Decoder.feature_levels). More rows may
    follow those of the items."""

    @property
    def rare_buckets(self) -> Sequence[Bucket]:
        """Buckets beside the default ones, with the same sizes, for what few requests need: captured once missed."""
        ...

    def plan(self, items: Sequence[MediaItem]) -> Plan:
        """The contents of a call's buffers for these items, in this order."""
        ...

    def required(self, items: Sequence[MediaItem]) -> Bucket:
        """The `required` of plan(items), from the items' sizes alone: packing asks often."""
        ...

    def split(self, item: MediaItem, limit: Bucket) -> list[MediaItem]:
        """Consecutive parts of `item` whose embeddings, one after the other, are the item's own.

        Each part fits `limit` (the largest captured bucket), or cannot be divided because its rows attend to each
        other. An item that fits is returned as it is. Parts are packed like items and have digests of their own.
        """
        ...

    def default_buckets(self) -> list[Bucket]:
        """Buckets to capture when the operator names none, ascending by cost."""
        ...

    def dense_buckets(self, bucket_list: Sequence[Bucket]) -> list[Bucket]:
        """Buckets beside those of the list in which full attention is dense, which computes padding, too; empty where
        it is not faster. They name the same sizes, and are for a single segment that nearly fills them, or for equal
        segments that fill them (EXACT)."""
        ...


class Drafter(Protocol):
    """A small network that predicts the token after the next (multi-token prediction). Its logits are the decoder's of
    its output, and its drafts go on from that output in place of the hidden state."""

    def __call__(self, hidden: Tensor, embeddings: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """For rows of a batch that the decoder has run: hidden [n, hidden_size] that it returned, or the drafter itself
        for the token before; embeddings [n, hidden_size] of each row's next token -> like hidden. Capturable."""
        ...

    def cache_keys(self, hidden: Tensor, embeddings: Tensor, positions: Tensor, batch: PagedBatch) -> None:
        """What __call__ writes to the cache, for rows after which nothing is drafted."""
        ...


class Decoder(Protocol):
    """A causal language model over a paged cache. Packed rows, no batch axis."""

    hidden_size: int
    vocab_size: int
    position_axes: int
    """3 for M-RoPE, 1 otherwise."""
    max_positions: int
    feature_levels: int
    """Number of layers, from the first on, whose outputs get features of the encoder added at vision rows (DeepStack);
    0 for none."""

    @property
    def drafter(self) -> Drafter | None: ...

    def cache_specs(self) -> list[CacheSpec]:
        """The cache of each layer that has one; the drafter's last."""
        ...

    def state_specs(self) -> list[Mapping[str, BufferSpec]]:
        """The recurrent state of each layer that has one, by name, without the axis of rows (StateRows in
        models/layers/kv_cache.py); empty for models that only attend."""
        ...

    def pending_specs(self, tokens: int) -> list[Mapping[str, BufferSpec]]:
        """What each layer with recurrent state keeps of `tokens` tokens that may be rejected (StateRows.inputs), by
        name, without the axis of slots."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, hidden_size]."""
        ...

    def forward(self, hidden: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """hidden [n, hidden_size], positions int [axes, n] -> the same after the final norm; writes keys and values.

        hidden may be [n, (1 + feature_levels) * hidden_size]: each row an embedding followed by its features, which are
        0 for text.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, hidden_size] -> [m, vocab_size], as the GEMM rounds them."""
        ...


def decode_bytes(decoder: Decoder, rows: float, context: float, dtype: torch.dtype) -> float:
    """Bytes that a decode step reads: every weight that `rows` tokens need, and their keys and values in `dtype`, once.
    Recurrent states are read and written."""
    heads = (getattr(decoder, "head", None), getattr(decoder, "tied_head", None))
    left_out = ("embed_tokens.",) if any(head is not None for head in heads) else ()
    cached = sum(spec.bytes_per_token(dtype) for spec in decoder.cache_specs())
    states = (spec for layer in decoder.state_specs() for spec in layer.values())
    row = context * cached + 2 * sum(prod(spec.shape) * spec.dtype.itemsize for spec in states)
    return weight_bytes(cast("nn.Module", decoder), rows, left_out) + rows * row


class ChatModel(Protocol):
    """A language model with an encoder of pictures and videos, or of audio."""

    encoder: VisionEncoder
    decoder: Decoder


RESULT_FLAGS = ("stopped", "finished", "emitted")
"""The columns, 0 or 1 each, that follow the patch in a row of a speech step's results."""


State = Mapping[str, Tensor]
"""The tables of the slot state by name, each [slots, ...]."""


class SpeechModel(Protocol):
    """A TTS model: two hidden vectors per position -> one patch of latents -> samples.

    Slot state: the tables of `state_specs`, each with a leading slot axis, made by the engine beside its own table
    "block_table" int32 [slots, max_pages], whose row is written before a slot's first prefill. Admission writes the
    others: last_patch (the last of the prompt audio, or zeros), length (prompt positions, all of them prefilled),
    conditioning (hidden vectors of the last of them, as `prefill` returns them), step 0, active True, seed, cfg,
    temperature, min_patches (the stop head counts from patch number min_patches + 1, from 0) and max_patches. From then
    on the steps advance them in place. A row whose slot is inactive, and slot 0, change nothing and write to scratch.

    Steps have the bucket {"rows": n} and the buffer `slots` int64 [rows]; fill with 0.
    """

    sample_rate: int
    """Samples per second of the output, 48000."""
    reference_sample_rate: int
    samples_per_patch: int
    patch_shape: tuple[int, int]
    """(latent frames, channels) of one patch."""
    solver_steps: tuple[int, ...]
    """Numbers of solver steps that are captured where the server names no others; the first is the default."""
    max_positions: int
    priming_patches: int
    """Number of last patches of its prompt audio that the codec of a continuation decodes first, from silence and
    unheard."""
    codec_memory_patches: int
    """Number of last patches on which the codec's streaming state depends: decoding them from silence restores it."""

    def step_weight_bytes(self, solver_steps: int) -> int:
        """Bytes of weights that a decode step of few rows reads: those of the flow solver once per evaluation."""
        ...

    def lora_places(self) -> Mapping[str, LoraPlace]:
        """The layers that adapters may change. The steps below take a `bank` of adapters, and with it the buffers
        lora_slots, lora_order and lora_tiles (models.layers.lora.LoraRows), with one unit for each row or prompt
        position; the rows of decode_step and tail are sorted by adapter."""
        ...

    def cache_specs(self) -> list[CacheSpec]:
        """The cache of each layer that has one."""
        ...

    def state_specs(self) -> dict[str, BufferSpec]:
        """Slot state outside every graph pool; shapes without the leading slot axis."""
        ...

    def encode_reference_pieces(self, wave: Tensor, pad: Literal["left", "right"]) -> Iterator[Tensor]:
        """Reference audio float32 [samples] at reference_sample_rate -> patches [n, frames, channels] float32, in
        consecutive pieces of a few seconds each.

        Each piece is computed when the iterator is advanced, so that steps of live streams can run in between.
        """
        ...

    def prefill(self, inputs: Mapping[str, Tensor], batch: PagedBatch, bank: LoraBank | None = None) -> Tensor:
        """Ragged backbone over packed prompt rows -> conditioning [rows, width] of the rows in `last`.

        inputs: token_ids and positions int64 [n]; patches [a, frames, channels]; patch_index int64 [n], the patch of
        each packed row, -1 for text; last int64 [rows], the packed rows that end a prompt (a chunk that does not reach
        the end has none).
        """
        ...

    def prefill_step(self, state: State, caches: Caches, page_size: int, bank: LoraBank | None = None) -> Capturable:
        """prefill of chunks, with cached context or without, whose slots' block tables are written.

        Bucket: tokens; audio, the number of patches (0: for text alone, without the work of patches); sequences.
        Buffers: the inputs of prefill, slot_mapping int64 [tokens], cu_seqlens int32 [sequences + 1], slots int64
        and seq_lens int32 [sequences], the keys that each prompt then has; fill with 0, patch_index with -1 and
        cu_seqlens with the number of real tokens. Output: conditioning [sequences, width].
        """
        ...

    def tail(self, solver_steps: int, state: State, bank: LoraBank | None = None) -> Capturable:
        """Conditioning of the rows in `slots` -> their next patches. Output: that of decode_step."""
        ...

    def decode_step(
        self, solver_steps: int, state: State, caches: Caches, page_size: int, bank: LoraBank | None = None
    ) -> Capturable:
        """One whole step for the rows in `slots`: the next patch, state advanced. A row in step 0 gives its first
        patch, as `tail` would: it costs a row of this step instead of a step of its own.

        Output: results float32 [rows, frames * channels + 3], a row's patch and RESULT_FLAGS: stopped, the stop head
        ended the speech with this patch; finished, stopped or max_patches reached (the slot is inactive from now on);
        emitted, the slot was active and the patch is new.
        """
        ...

    def vae_step(self, state: State) -> Capturable:
        """Output audio float32 [rows, samples_per_patch] of patches of `slots`, VAE state advanced.

        Buffers: slots; results as decode_step and tail return them, of which the patches and `emitted` are read. Rows
        that emitted nothing (overrun rows) give silence and do not change their state. No other step uses this state,
        so this one may run in parallel with the next decode step. A stream begins with zeros in its row of `vae`; to
        prime it, run this step for each of the last min(priming_patches, n) patches of its prompt audio.
        """
        ...
