"""The audio tower of Qwen3-ASR with its projector, as a capturable encoder.

A chunk of 100 log-mel frames, one second, is convolved alone and becomes 13 rows, the "patches" of the engine. Windows
of n_window_infer frames, from the item's start, attend to themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.interfaces.capturable import Bucket, BufferSpec, Plan
from models.interfaces.media import MediaItem
from models.layers.mlp import MLP
from models.layers.precision import without_tf32
from models.layers.tower import TowerBlock, run_tower
from models.layers.upload import upload_frames
from models.qwen3_asr.config import CHUNK_FRAMES, CHUNK_ROWS, MEL_BANDS, AudioConfig
from models.qwen3_asr.items import chunks_of, part_of
from models.qwen3_asr.log_mel import LogMel

NORM_EPS = 1e-5
KERNEL, STRIDE, NUM_CONVS = 3, 2, 3
BANDS = MEL_BANDS // STRIDE**NUM_CONVS
"""Bands behind the convolutions."""
_CONV_CHUNKS = 16
"""Chunks that are convolved at a time: the first convolution makes 3 MB of each, 16 bits a value."""
_BUCKET_CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Turns of a few seconds, packs of them, half a minute and two minutes."""


class AudioEncoder(nn.Module):
    """Implements models.protocol.VisionEncoder.

    Buffers: mel float32 [chunks, 128, 100], zeros behind the end of an item; rows int32 [13 * chunks], those of the
    convolved rows that hold audio; cu_seqlens int32 [sequences + 1], its tail repeats the last value.
    """

    rare_buckets: Sequence[Bucket] = ()
    sinusoid: Tensor

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        self.log_mel = LogMel()
        channels, width = config.conv_channels, config.hidden_size
        inputs = [1, *[channels] * (NUM_CONVS - 1)]
        self.convs = nn.ModuleList(nn.Linear(count * KERNEL**2, channels) for count in inputs)
        self.conv_out = nn.Linear(channels * BANDS, width, bias=False)
        self.register_buffer("sinusoid", torch.from_numpy(sinusoid(CHUNK_ROWS, width)), persistent=False)
        self.blocks = nn.ModuleList(
            TowerBlock(width, config.intermediate_size, config.num_heads, "gelu", NORM_EPS) for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.projector = MLP(width, width, "gelu", out_features=config.out_features)

    def required(self, items: Sequence[MediaItem]) -> Bucket:
        return {
            "patches": sum(item.num_patches for item in items),
            "sequences": sum(item.num_sequences for item in items),
        }

    def plan(self, items: Sequence[MediaItem]) -> Plan:
        rows, ends, first = [np.empty(0, np.int32)], [0], 0
        for item in items:
            # Only an item's last chunk has rows without audio, and they are its last.
            rows.append(np.arange(first, first + item.num_embeds, dtype=np.int32))
            first += item.num_patches
            windows = range(self.config.window_rows, item.num_embeds + self.config.window_rows, self.config.window_rows)
            ends += [ends[-1] + min(end, item.num_embeds) for end in windows]
        return Plan(
            arrays={"rows": np.concatenate(rows), "cu_seqlens": np.array(ends, dtype=np.int32)},
            tensors={"mel": [self.features(item) for item in items]},
            fills={"cu_seqlens": float(ends[-1])},
            required=self.required(items),
        )

    def features(self, item: MediaItem) -> Tensor:
        """Log-mel features of the item's chunks, float32 [chunks, 128, 100] on the encoder's device. Unused frames of
        the last chunk are 0, which is not silence."""
        mel = self.log_mel(upload_frames([item.arrays["samples"]], self.sinusoid.device)[0])
        mel = F.pad(mel, (0, -mel.shape[1] % CHUNK_FRAMES))
        start, stop = chunks_of(item)
        return mel.view(MEL_BANDS, -1, CHUNK_FRAMES)[:, start:stop].transpose(0, 1).contiguous()

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        chunks = bucket["patches"] // CHUNK_ROWS
        return {
            "mel": BufferSpec((chunks, MEL_BANDS, CHUNK_FRAMES), torch.float32),
            "rows": BufferSpec((chunks * CHUNK_ROWS,), torch.int32),
            "cu_seqlens": BufferSpec((bucket["sequences"] + 1,), torch.int32),
        }

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        """embeds [patches, out_features], of which as many are used as plan(items) names rows."""
        x = self.convolved(buffers["mel"]) + self.sinusoid.to(self.conv_out.weight.dtype)
        x = x.flatten(0, 1).index_select(0, buffers["rows"])
        x = run_tower(self.blocks, x, self.norm, None, buffers["cu_seqlens"], self.config.window_rows)
        return {"embeds": self.projector(x)}

    def convolved(self, mel: Tensor) -> Tensor:
        """[chunks, 128, 100] -> [chunks, 13, hidden_size]."""
        with without_tf32():
            return torch.cat([self._convolved_block(block) for block in mel.split(_CONV_CHUNKS)])

    def _convolved_block(self, mel: Tensor) -> Tensor:
        x = mel[:, None].to(self.conv_out.weight.dtype)
        for conv in cast("Sequence[nn.Linear]", self.convs):
            weight = conv.weight.view(conv.out_features, -1, KERNEL, KERNEL)
            x = F.gelu(F.conv2d(x, weight, conv.bias, stride=STRIDE, padding=KERNEL // 2))
        return self.conv_out(x.permute(0, 3, 1, 2).flatten(2))

    def split(self, item: MediaItem, limit: Bucket) -> list[MediaItem]:
        """Parts of whole windows."""
        if item.num_patches <= limit["patches"] and item.num_sequences <= limit["sequences"]:
            return [item]
        start, stop = chunks_of(item)
        window = self.config.window_chunks
        size = window * max(1, min(limit["patches"] // CHUNK_ROWS // window, limit["sequences"]))
        return [part_of(item, first, min(first + size, stop), self.config) for first in range(start, stop, size)]

    def default_buckets(self) -> list[Bucket]:
        """Every item begins a window, so there may be as many windows as chunks."""
        return [{"patches": chunks * CHUNK_ROWS, "sequences": chunks} for chunks in _BUCKET_CHUNKS]

    def dense_buckets(self, bucket_list: Sequence[Bucket]) -> list[Bucket]:
        return []


def sinusoid(rows: int, width: int) -> np.ndarray:
    """Whisper's positions, which restart with every chunk: float32 [rows, width]."""
    frequencies = np.exp(-np.log(10_000.0) / (width // 2 - 1) * np.arange(width // 2))
    angles = np.arange(rows)[:, None] * frequencies
    return np.concatenate((np.sin(angles), np.cos(angles)), axis=1).astype(np.float32)
