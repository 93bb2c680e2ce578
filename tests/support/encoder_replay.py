"""Vision encoders through captured graphs, against the same encoder run eagerly on buffers of the exact size.

On a CPU a graph's replay is the same forward over the static, padded buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, Plan
from models.interfaces.media import MediaItem
from models.protocol import VisionEncoder
from models.qwen_vl.v3.vision import Qwen3VLEncoder
from models.qwen_vl.vision import Qwen2VLEncoder
from models.qwen_vl.windowed_vision import Qwen25VLEncoder
from service.graphs.buckets import fits
from service.graphs.buffers import exact_buffers
from service.graphs.observations import Observations
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner

CPU = torch.device("cpu")
QwenEncoder = Qwen2VLEncoder | Qwen25VLEncoder | Qwen3VLEncoder


class CapturedEncoder:
    """An encoder with all of `buckets`, which ascend, captured. `runner` replays them."""

    def __init__(
        self, encoder: VisionEncoder, buckets: Sequence[Bucket], device: torch.device = CPU, pool_bytes: int = 1 << 30
    ) -> None:
        self.encoder = encoder
        self._buckets, self._device = buckets, device
        with torch.inference_mode():
            pool = GraphPool(device, pool_bytes)
            self.runner = GraphRunner("test", "encoder", encoder, buckets, pool, Observations())
            while self.runner.capture_next(idle=True):
                pass
        assert self.runner.captured == list(buckets)[::-1]

    def eager(self, items: Sequence[MediaItem]) -> Tensor:
        """Embeddings of `items` in one call at the exact size."""
        return eager(self.encoder, items, self._device)

    def replayed(self, items: Sequence[MediaItem]) -> Tensor:
        """Embeddings of a replay, before which every byte of the static buffers and all last outputs are poisoned."""
        assert self.runner._static is not None
        self.runner._static.device.fill_(255)
        for graph in self.runner._graphs.values():
            for output in graph.capture.outputs.values():
                output.fill_(float("nan"))
        run = self.runner.run(self.encoder.plan(items))
        assert run.route == "replay"
        assert run.outputs["embeds"].isfinite().all()
        return run.outputs["embeds"][: sum(item.num_embeds for item in items)].clone()

    def check_replay(self, items: Sequence[MediaItem], tolerance: float) -> None:
        """A replay gives the same as the eager run."""
        torch.testing.assert_close(self.replayed(items), self.eager(items), atol=tolerance, rtol=0)

    def check_mix(self, items: Sequence[MediaItem], tolerance: float) -> None:
        """Items give the same together as alone: run eagerly, and replayed if a bucket holds all of them."""
        alone = torch.cat([self.eager([one]) for one in items])
        torch.testing.assert_close(self.eager(items), alone, atol=tolerance, rtol=0)
        if any(fits(bucket, self.encoder.required(items)) for bucket in self._buckets):
            torch.testing.assert_close(self.replayed(items), alone, atol=tolerance, rtol=0)

    def replays_on_a_poisoned_pool(
        self, mixes: Iterable[Sequence[MediaItem]], poison: Callable[[Plan], AbstractContextManager[Plan]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows of each mix's replay, and the embeddings of the eager run.

        Before each replay the largest graph runs with NaN in every row, so that its intermediates fill the pool.
        poison: of the mix's plan, makes the plan of that run, inside which NaN comes of it.
        """
        for items in mixes:
            plan = self.encoder.plan(items)
            with poison(plan) as poisoned:
                assert self.runner.run(poisoned).outputs["embeds"].isnan().all()
            run = self.runner.run(plan)
            assert run.route == "replay"
            yield run.outputs["embeds"].clone(), self.eager(items)


@contextmanager
def bytes_of_nan(encoder: QwenEncoder, largest: Bucket, plan: Plan) -> Iterator[Plan]:
    """A poison for replays_on_a_poisoned_pool: every byte is NaN to the encoder, in a run of the `largest` bucket."""
    values = encoder.byte_values.clone()
    encoder.byte_values.fill_(float("nan"))
    yield replace(plan, required=largest)
    encoder.byte_values.copy_(values)


def eager(encoder: VisionEncoder, items: Sequence[MediaItem], device: torch.device = CPU) -> Tensor:
    """Embeddings of `items` in one call at the exact size, which is what packing is told."""
    plan = encoder.plan(items)
    assert encoder.required(items) == plan.required
    embeds = encoder.forward(exact_buffers(encoder.buffer_specs(plan.required), plan, device), plan.required)["embeds"]
    return embeds[: sum(item.num_embeds for item in items)]


def padded(encoder: VisionEncoder, items: Sequence[MediaItem], bucket: Bucket, **fills: float) -> Tensor:
    """All rows of `bucket`, embeddings of `items` first. fills: what buffers hold behind the plan, by name."""
    plan = encoder.plan(items)
    plan = replace(plan, fills={**plan.fills, **fills})
    return encoder.forward(exact_buffers(encoder.buffer_specs(bucket), plan, CPU), bucket)["embeds"]


def grid_item(num_frames: int, h: int, w: int) -> MediaItem:
    """An item of the Qwen-VL families: a picture, or a video of so many frames, of h x w patches, without pixels."""
    pairs = -(-num_frames // 2)
    return MediaItem(
        kind="image" if num_frames == 1 else "video",
        frames=(),
        arrays={"grid_thw": np.array([pairs, h, w], dtype=np.int32)},
        num_patches=pairs * h * w,
        num_sequences=pairs,
        num_embeds=pairs * h * w // 4,
        digest=bytes(32),
    )


def random_item(num_frames: int, rows: int, columns: int, seed: int, *, block: int) -> MediaItem:
    """grid_item of rows x columns blocks of 2 x 2 patches, `block` pixels a side, with random pixels below 255: a byte
    that only padding holds."""
    values = np.random.default_rng(seed)
    size = (block * rows, block * columns, 3)
    frames = tuple(values.integers(0, 255, size, dtype=np.uint8) for _ in range(num_frames))
    return replace(grid_item(num_frames, 2 * rows, 2 * columns), frames=frames)
