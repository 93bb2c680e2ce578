"""A chat family of a few thousand parameters, with a real decoder and an encoder whose items are seeded noise."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.interfaces.capturable import Bucket, BufferSpec, Plan
from models.interfaces.media import MediaItem, PlaceholderRange, Prompt
from models.layers.attention import varlen_attention
from models.layers.block import BlockConfig
from models.layers.decoder import CausalDecoder, DecoderConfig

VOCABULARY = 89
PADDED_VOCABULARY = 96
WIDTH = 32
MEDIA_TOKEN = 88
END_TOKEN = 87
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127) if chr(code) not in "#$%&;<>@^")
"""Characters of the tokens below END_TOKEN."""
CONTEXT = 256
PATCH_VALUES = 12


class TinyEncoder(nn.Module):
    """One attention layer inside each sequence; two patches make one embedding.

    shift is 0 for every patch; a test that fills its padding with NaN poisons queries, keys and values there.
    """

    rare_buckets: Sequence[Bucket] = ()

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH_VALUES, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)
        self.fail_on: bytes | None = None
        """Digest of an item that plan rejects."""

    def required(self, items: Sequence[MediaItem]) -> Bucket:
        lengths = [int(length) for item in items for length in item.arrays["lengths"]]
        return {"patches": sum(lengths), "sequences": len(lengths), "max_seqlen": max(lengths, default=0)}

    def plan(self, items: Sequence[MediaItem]) -> Plan:
        if any(item.digest == self.fail_on for item in items):
            raise ValueError("bad item")
        lengths = np.concatenate([item.arrays["lengths"] for item in items]) if items else np.zeros(0, np.int32)
        pixels = [frame.reshape(-1, PATCH_VALUES) for item in items for frame in item.frames]
        ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return Plan(
            arrays={
                "pixels": np.concatenate(pixels) if pixels else np.zeros((0, PATCH_VALUES), np.uint8),
                "shift": np.zeros(int(ends[-1]), np.float32),
                "cu_seqlens": ends,
            },
            fills={"cu_seqlens": float(ends[-1])},
            required=self.required(items),
        )

    def split(self, item: MediaItem, limit: Bucket) -> list[MediaItem]:
        parts, start = [], 0
        lengths = item.arrays["lengths"]
        while start < len(lengths):
            stop = start + 1
            while (
                stop < len(lengths)
                and lengths[start : stop + 1].sum() <= limit["patches"]
                and stop + 1 - start <= limit["sequences"]
            ):
                stop += 1
            parts.append(self._part(item, start, stop))
            start = stop
        return [item] if len(parts) == 1 else parts

    def _part(self, item: MediaItem, start: int, stop: int) -> MediaItem:
        lengths = item.arrays["lengths"][start:stop]
        return replace(
            item,
            frames=item.frames[start:stop],
            arrays={"lengths": lengths},
            num_patches=int(lengths.sum()),
            num_sequences=len(lengths),
            num_embeds=int(lengths.sum()) // 2,
            digest=hashlib.sha256(item.digest + bytes([start, stop])).digest(),
        )

    def default_buckets(self) -> list[Bucket]:
        return [{"patches": p, "sequences": max(2, p // 8), "max_seqlen": p} for p in (16, 32, 48, 96)]

    def dense_buckets(self, bucket_list: Sequence[Bucket]) -> list[Bucket]:
        return []

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        return {
            "pixels": BufferSpec((bucket["patches"], PATCH_VALUES), torch.uint8),
            "shift": BufferSpec((bucket["patches"],), torch.float32),
            "cu_seqlens": BufferSpec((bucket["sequences"] + 1,), torch.int32),
        }

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        x = self.embed(buffers["pixels"].to(self.embed.weight.dtype) / 255)
        x = x + buffers["shift"][:, None].to(x.dtype)
        q, k, v = self.qkv(x).view(-1, 3, 2, WIDTH // 2).unbind(1)
        x = x + varlen_attention(q, k, v, buffers["cu_seqlens"], buffers["cu_seqlens"]).flatten(1)
        return {"embeds": self.out(x.view(-1, 2 * WIDTH))}


@dataclass(frozen=True)
class TinyChat:
    encoder: TinyEncoder
    decoder: CausalDecoder


def tiny_model(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> TinyChat:
    """Seeded weights: the decoder's so large that greedy tokens vary; the encoder's so small that its softmax is not
    sharp, where the order of float32 sums would show in the fifth digit."""
    block = BlockConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-6,
        qkv_bias=True,
        qk_norm=False,
    )
    config = DecoderConfig(
        vocab_size=PADDED_VOCABULARY,
        num_layers=2,
        block=block,
        max_positions=CONTEXT,
        rope_theta=1e4,
        tied=False,
        mrope_section=(4, 2, 2),
    )
    generator = torch.Generator().manual_seed(7)
    model = TinyChat(TinyEncoder(), CausalDecoder(config))
    for module, gain in ((model.encoder, 1.0), (model.decoder, 3.0)):
        for name, parameter in module.named_parameters():
            scale = gain / parameter.shape[-1] ** 0.5
            offset = 1.0 if "norm" in name else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = offset + (0.1 if "norm" in name else scale) * noise
        module.to(device=device, dtype=dtype).requires_grad_(False)
    return model


def tiny_text(token_ids: Sequence[int]) -> bytes:
    """Each id below END_TOKEN is a character of ALPHABET."""
    return "".join(ALPHABET[token] for token in token_ids if token < END_TOKEN).encode()


def tiny_processor() -> Any:
    """What a worker reads of a processor."""
    return SimpleNamespace(
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
        stop_token_ids=frozenset({END_TOKEN}),
        detokenize=tiny_text,
        tokenize=lambda text: [ALPHABET.index(character) for character in text if character in ALPHABET],
    )


def tiny_item(seed: int, lengths: Sequence[int]) -> MediaItem:
    """Frames of `lengths` patches (even numbers) of seeded bytes."""
    random = np.random.default_rng(seed)
    frames = tuple(random.integers(0, 256, (length, 1, PATCH_VALUES), dtype=np.uint8) for length in lengths)
    return MediaItem(
        kind="image",
        frames=frames,
        arrays={"lengths": np.array(lengths, dtype=np.int32)},
        num_patches=sum(lengths),
        num_sequences=len(lengths),
        num_embeds=sum(lengths) // 2,
        digest=hashlib.sha256(b"".join(frame.tobytes() for frame in frames) + repr(tuple(lengths)).encode()).digest(),
    )


def tiny_prompt(pieces: Sequence[Sequence[int] | MediaItem]) -> Prompt:
    """Text pieces are ids; an item takes one position on the first axis and counts up on the others."""
    ids: list[int] = []
    columns: list[np.ndarray] = []
    items: list[MediaItem] = []
    placeholders: list[PlaceholderRange] = []
    position = 0
    for piece in pieces:
        if isinstance(piece, MediaItem):
            length = piece.num_embeds
            placeholders.append(PlaceholderRange(len(items), len(ids), length))
            items.append(piece)
            ids += [MEDIA_TOKEN] * length
            columns.append(np.stack([np.full(length, position), *[position + np.arange(length)] * 2]))
            position += length
        else:
            ids += piece
            columns.append(np.broadcast_to(position + np.arange(len(piece)), (3, len(piece))))
            position += len(piece)
    return Prompt(
        np.array(ids, dtype=np.int32),
        np.concatenate(columns, axis=1).astype(np.int32),
        position,
        tuple(items),
        tuple(placeholders),
    )
