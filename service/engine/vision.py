"""The encoder stage: items of all waiting requests are packed together, encoded ahead of their prefill and cached."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.media import MediaItem
from models.protocol import Capacity, Plan, VisionEncoder
from service.engine.encoder_cache import EncoderCache
from service.engine.faults import LAUNCH_ERRORS
from service.engine.memory import peak_bytes
from service.engine.sequence import Sequence
from service.engine.worker import MemoryNeeds, WorkerContext
from service.graphs.accounting import Route
from service.graphs.buffers import exact_buffers
from service.graphs.packing import pack
from service.graphs.runner import GraphRunner

log = logging.getLogger(__name__)

_MOST_PARTS = 32
"""Parts that are packed at a time; the oldest first."""


@dataclass(frozen=True, eq=False)
class Part:
    """A piece of an item that is encoded in one go; its embeddings start at row `offset` of the item's."""

    digest: bytes
    item: MediaItem
    offset: int
    needs: Capacity


@dataclass(eq=False)
class Wanted:
    """An item to be encoded. embeds [num_embeds, width] is filled part by part."""

    item: MediaItem
    parts: list[Part]
    embeds: Tensor | None = None
    alone: bool = False
    """A pass that it shared failed; it is tried by itself before its requests fail."""


@dataclass(frozen=True)
class Encoded:
    """One pass that was launched."""

    num_patches: int
    route: Route


@dataclass(eq=False)
class EncodeError(Exception):
    """A pass failed for good; requests with these items cannot be answered."""

    cause: Exception
    digests: frozenset[bytes] = field(default_factory=frozenset)


class VisionStage:
    """Holds the encoder's recordings and the cache of its outputs."""

    def __init__(self, name: str, encoder: VisionEncoder, width: int, context: WorkerContext) -> None:
        config = context.config
        ladder = list(encoder.default_ladder())
        if config.encoder_buckets:
            ladder = [_with_patches(ladder, patches) for patches in sorted(set(config.encoder_buckets))]
        self._name = name
        self._encoder = encoder
        self._width = width
        self._context = context
        self.cache = EncoderCache(config.encoder_cache_bytes)
        # Hot are every other rung from the largest down; an idle engine fills the gaps.
        self.runner = GraphRunner(
            name,
            "encoder",
            encoder,
            ladder,
            context.pool,
            context.observations,
            enabled=config.graphs,
            hot=ladder[::-1][::2],
        )
        self._wanted: OrderedDict[bytes, Wanted] = OrderedDict()

    def measure(self) -> MemoryNeeds:
        """Peak of one eager pass of the largest rung; the cache is accounted in full."""
        device, encoder = self._context.device, self._encoder
        if device.type != "cuda":
            return MemoryNeeds()
        largest = self.runner.ladder[-1]
        buffers = exact_buffers(encoder.buffer_specs(largest), Plan(arrays={}, needs=largest), device)
        peak = peak_bytes(lambda: encoder.forward(buffers, largest), device)
        return MemoryNeeds(workspace=peak, graphs=peak, state=self.cache.limit_bytes)

    def warm_up(self) -> None:
        """The smallest rung; the largest was run by `measure`."""
        self.runner.warm_up(self.runner.ladder[:1])

    def has_work(self) -> bool:
        return bool(self._wanted)

    @property
    def oldest_patches(self) -> int:
        """Of the part that has waited longest; there is one."""
        return next(iter(self._wanted.values())).parts[0].item.num_patches

    def has_embeddings(self, sequence: Sequence) -> bool:
        """Everything past the sequence's prefix hit is encoded and pinned for it."""
        if not sequence.prompt.items:
            return True
        return all(
            item.digest in sequence.pinned and self.cache.embeds(item.digest) is not None
            for item in sequence.items_from(sequence.hit_pages * sequence.page_size).values()
        )

    def request(self, sequence: Sequence) -> bool:
        """Pins the items that a waiting sequence needs and queues those that are not cached.

        False when the cache has no room beside what others have pinned: ask again later, before anyone else.
        """
        items = sequence.items_from(sequence.hit_pages * sequence.page_size)
        missing = {item.digest: item for item in items.values() if item.digest not in sequence.pinned}
        if not missing:
            return True
        itemsize = self._context.dtype.itemsize
        if not self.cache.try_pin({d: item.num_embeds * self._width * itemsize for d, item in missing.items()}):
            return False
        for index, item in items.items():
            last = max(sequence.last_position(index), sequence.pinned.get(item.digest, 0))
            sequence.pinned[item.digest] = last
        for digest, item in missing.items():
            known = self.cache.embeds(digest) is not None or digest in self._wanted
            self._context.observations.count(f"encoder_cache_{'hits' if known else 'misses'}_total", model=self._name)
            if not known:
                self._want(item)
        return True

    def _want(self, item: MediaItem) -> None:
        if not item.num_embeds:
            self._context.observations.count_eager_step("empty", model=self._name, kind="encoder")
            self.cache.fill(item.digest, self._empty(0))
            return
        largest = self.runner.ladder[-1]
        parts, offset = [], 0
        for part in self._encoder.split(item, largest):
            parts.append(Part(item.digest, part, offset, self._encoder.needs([part])))
            offset += part.num_embeds
        assert offset == item.num_embeds
        self._wanted[item.digest] = Wanted(item, parts)

    def _empty(self, rows: int) -> Tensor:
        return torch.empty((rows, self._width), dtype=self._context.dtype, device=self._context.device)

    def release(self, sequence: Sequence, num_prefilled: int | None = None) -> None:
        """Unpins what the keys of the first `num_prefilled` positions cover; all of it without a number."""
        for digest, last in list(sequence.pinned.items()):
            if num_prefilled is None or last < num_prefilled:
                del sequence.pinned[digest]
                if self.cache.unpin(digest):
                    self._wanted.pop(digest, None)

    def embeds(self, sequence: Sequence, item: int) -> Tensor:
        """Of a pinned, encoded item: [num_embeds, width]."""
        embeds = self.cache.embeds(sequence.prompt.items[item].digest)
        assert embeds is not None
        return embeds

    def next_group(self) -> list[Part]:
        """The parts to encode together next: those packed with the oldest. What is left over is packed again with
        whatever comes, which defers the emptier groups."""
        oldest = next(iter(self._wanted.values()))
        if oldest.alone:
            return oldest.parts[:1]
        parts = [part for wanted in self._wanted.values() if not wanted.alone for part in wanted.parts][:_MOST_PARTS]
        ladder = self.runner.recorded or self.runner.ladder
        group = pack([part.needs for part in parts], ladder)[0]
        return [parts[index] for index in group.items]

    def launch(self, parts: Seq[Part]) -> Encoded | None:
        """Encodes parts. None when the pass failed and its items will be tried one by one; EncodeError when an item
        failed by itself."""
        try:
            run = self.runner.run(self._encoder.plan([part.item for part in parts]))
            embeds, row = run.outputs["embeds"], 0
            for part in parts:
                wanted = self._wanted[part.digest]
                if wanted.embeds is None:
                    wanted.embeds = self._empty(wanted.item.num_embeds)
                count = part.item.num_embeds
                wanted.embeds[part.offset : part.offset + count] = embeds[row : row + count]
                row += count
        except torch.AcceleratorError:
            raise
        except LAUNCH_ERRORS as error:
            self._failed(parts, error)
            return None
        for part in parts:
            self._finish(part)
        return Encoded(sum(part.item.num_patches for part in parts), run.route)

    def _finish(self, part: Part) -> None:
        wanted = self._wanted[part.digest]
        wanted.parts.remove(part)
        if not wanted.parts:
            assert wanted.embeds is not None
            self.cache.fill(part.digest, wanted.embeds)
            del self._wanted[part.digest]

    def _failed(self, parts: Seq[Part], error: Exception) -> None:
        digests = frozenset(part.digest for part in parts)
        if len(digests) == 1:
            raise EncodeError(error, digests) from error
        log.warning("an encoder pass of %d items failed, each is tried alone: %s", len(digests), error)
        for digest in digests:
            self._wanted[digest].alone = True


def _with_patches(ladder: Seq[Capacity], patches: int) -> Capacity:
    """The operator's patch budget with the family's proportions: other sizes of the next rung, or scaled."""
    above = next((capacity for capacity in ladder if capacity["patches"] >= patches), None)
    if above is not None:
        return dict(above) | {"patches": patches}
    factor = -(-patches // ladder[-1]["patches"])
    return {name: size * factor for name, size in ladder[-1].items()} | {"patches": patches}
