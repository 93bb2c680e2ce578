"""The encoder stage: packs the items of all waiting requests together, encodes them ahead of their prefill and caches
the outputs."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from models.interfaces.capturable import Bucket
from models.interfaces.media import MediaItem
from models.layers.resample import resized
from models.protocol import VisionEncoder
from service.engine.chat.sequence import ChatSequence
from service.engine.core.faults import LaunchError, RepeatableLaunchError, launch_errors, with_second_try
from service.engine.core.readback import Mark, mark
from service.engine.core.request_stats import RequestStats
from service.engine.core.worker import MemoryRequirements, WorkerContext
from service.engine.memory import peak_bytes
from service.graphs.buckets import captured_first, combine, cost_of, key_of, pack
from service.graphs.observations import Route
from service.graphs.runner import GraphRunner, Run

log = logging.getLogger(__name__)


@dataclass
class Entry:
    """The place of an item in the cache."""

    num_bytes: int
    """Bytes of its embeddings, which count from its first pin on."""
    pins: int = 0
    """Number of sequences that still need them."""
    embeds: Tensor | None = None
    """[num_embeds, embeds_width]; None until it is encoded."""


class EncoderCache:
    """The entries, by digest of the item. Pinned ones stay; the others are evicted, least recently used first, to make
    room.

    num_bytes: of all entries; pinned_bytes: of those with a pin.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.pinned_bytes = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()

    def embeds(self, digest: bytes) -> Tensor | None:
        """The item's embeddings [num_embeds, embeds_width]; None if it is unknown or not encoded yet."""
        entry = self._entries.get(digest)
        return entry.embeds if entry else None

    def try_pin(self, sizes: dict[bytes, int]) -> bool:
        """Pins the entries of these digests, all or none; sizes are in bytes. Unknown digests get an empty entry.

        False if they do not fit next to the pinned entries. If nothing is pinned, they are admitted even over the
        limit.
        """
        more = sum(
            size for digest, size in sizes.items() if digest not in self._entries or not self._entries[digest].pins
        )
        if self.pinned_bytes and self.pinned_bytes + more > self.limit_bytes:
            return False
        for digest, size in sizes.items():
            entry = self._entries.get(digest)
            if entry is None:
                entry = self._entries[digest] = Entry(size)
                self.num_bytes += size
            if not entry.pins:
                self.pinned_bytes += entry.num_bytes
            entry.pins += 1
            self._entries.move_to_end(digest)
        self._make_room()
        return True

    def unpin(self, digest: bytes) -> bool:
        """Removes one pin. True if the entry was dropped: it was empty, and no sequence waits for it any more."""
        entry = self._entries[digest]
        entry.pins -= 1
        if entry.pins:
            return False
        self.pinned_bytes -= entry.num_bytes
        if entry.embeds is None:
            self._drop(digest)
            return True
        self._make_room()
        return False

    def fill(self, digest: bytes, embeds: Tensor) -> None:
        """Stores the embeddings of a pinned entry."""
        entry = self._entries[digest]
        assert entry.pins and embeds.numel() * embeds.element_size() == entry.num_bytes
        entry.embeds = embeds

    def _make_room(self) -> None:
        while self.num_bytes > self.limit_bytes:
            victim = next((digest for digest, entry in self._entries.items() if not entry.pins), None)
            if victim is None:
                return
            self._drop(victim)

    def _drop(self, digest: bytes) -> None:
        self.num_bytes -= self._entries.pop(digest).num_bytes


_MAX_PARTS = 32
"""Number of parts that are packed together; the oldest come first."""


@dataclass(frozen=True, eq=False)
class Part:
    """A piece of an item, or a whole one, that is encoded in one pass."""

    digest: bytes
    """Digest of the whole item."""
    item: MediaItem
    """The piece itself."""
    offset: int
    """Row of the whole item's embeddings at which those of the piece start."""
    required: Bucket
    """The smallest bucket that holds it."""


@dataclass(eq=False)
class PendingItem:
    """An item to be encoded. embeds [num_embeds, embeds_width] is filled part by part."""

    item: MediaItem
    parts: list[Part]
    embeds: Tensor | None = None
    waiting: list[RequestStats] = field(default_factory=list)
    """Statistics of the sequences that wait for the item."""
    alone: bool = False
    """A pass that it shared with other items failed, so it is tried alone before its requests fail."""


@dataclass(frozen=True)
class Encoded:
    """An encoder pass that was launched."""

    route: Route
    begun: Mark
    """The mark before the pass."""
    waiting: tuple[RequestStats, ...]
    """Statistics of the sequences that wait for its items."""


@dataclass(eq=False)
class EncodeError(Exception):
    """A pass failed for good; requests with these items cannot be answered."""

    cause: LaunchError
    digests: frozenset[bytes] = field(default_factory=frozenset)


class VisionStage:
    """The encoder of one model: its captured graphs, the items that wait for it, and the cache of its outputs."""

    def __init__(self, name: str, encoder: VisionEncoder, embeds_width: int, context: WorkerContext) -> None:
        config = context.config
        bucket_list, rare_buckets = list(encoder.default_buckets()), encoder.rare_buckets
        if config.encoder_buckets:
            bucket_list = [_with_patches(bucket_list, patches) for patches in sorted(set(config.encoder_buckets))]
        self._name = name
        self._encoder = encoder
        self._bucket_list = sorted(bucket_list, key=cost_of)
        dense_buckets = encoder.dense_buckets(bucket_list)
        self._dense = set(map(key_of, dense_buckets))
        self._embeds_width = embeds_width
        self._context = context
        self.cache = EncoderCache(config.encoder_cache_bytes)
        # Every second bucket, from the largest down, is captured before readiness, then the others and the dense ones.
        # After a restart dense buckets wait for a call that fills one: cuDNN plans each of them, and takes a second for
        # the first, for which other requests would have to wait.
        self.runner = GraphRunner(
            name,
            "encoder",
            encoder,
            [*bucket_list, *dense_buckets, *rare_buckets],
            context.pool,
            context.observations,
            enabled=config.graphs,
            before_ready=captured_first(bucket_list[::-1][::2], restarted=config.restarted),
            dense_buckets=dense_buckets,
            on_demand=[*rare_buckets, *(dense_buckets if config.restarted else ())],
        )
        self._pending: OrderedDict[bytes, PendingItem] = OrderedDict()

    def measure(self) -> MemoryRequirements:
        """Peak of one eager pass of the largest bucket, and the whole limit of the cache."""
        device = self._context.device
        if device.type == "cpu":
            return MemoryRequirements()
        peak = peak_bytes(self.runner.filler_run(self._bucket_list[-1]), device)
        return MemoryRequirements(workspace=peak, state=self.cache.limit_bytes)

    def warm_up(self) -> Iterator[None]:
        """Runs the smallest bucket (`measure` has run the largest), and the resizing of pictures that arrive in their
        original size."""
        yield from self.runner.warm_up(self._bucket_list[:1])
        resized(torch.zeros((1, 2, 2, 3), dtype=torch.uint8, device=self._context.device), 3, 3)
        yield

    def has_work(self) -> bool:
        return bool(self._pending)

    @property
    def oldest_patches(self) -> int:
        """Patches of a pass over the part that has waited longest. Call it only while there is work."""
        return self.patches(next(iter(self._pending.values())).parts[:1])

    def has_embeddings(self, sequence: ChatSequence) -> bool:
        """Whether every item after the sequence's prefix hit is encoded and pinned for it."""
        if not sequence.prompt.items:
            return True
        return all(
            item.digest in sequence.pinned and self.cache.embeds(item.digest) is not None
            for item in sequence.items_from(sequence.hit_pages * sequence.page_size).values()
        )

    def request_all(self, waiting: Sequence[ChatSequence]) -> None:
        """Pins and queues the items of waiting sequences, in order, until the cache has no room. A sequence that finds
        no room pins nothing while it waits, and those behind it release what they have pinned, so that no two of them
        can wait for each other."""
        for place, sequence in enumerate(waiting):
            if not sequence.prompt.items or self._request(sequence):
                continue
            for other in waiting[place:]:
                if other.pinned:
                    self.release(other)
            if not self._request(sequence):
                return

    def _request(self, sequence: ChatSequence) -> bool:
        """Pins the items that a waiting sequence needs and queues those that are not cached. False when the cache has
        no room beside what others have pinned."""
        items = sequence.items_from(sequence.hit_pages * sequence.page_size)
        missing = {item.digest: item for item in items.values() if item.digest not in sequence.pinned}
        if not missing:
            return True
        itemsize = self._context.dtype.itemsize
        if not self.cache.try_pin({d: item.num_embeds * self._embeds_width * itemsize for d, item in missing.items()}):
            return False
        for index, item in items.items():
            last = max(sequence.last_position(index), sequence.pinned.get(item.digest, 0))
            sequence.pinned[item.digest] = last
        for digest, item in missing.items():
            known = self.cache.embeds(digest) is not None or digest in self._pending
            self._context.observations.count(f"encoder_cache_{'hits' if known else 'misses'}_total", model=self._name)
            if not known:
                sequence.stats.encoded_media += 1
                self._enqueue(item)
            if (pending := self._pending.get(digest)) is not None:
                pending.waiting.append(sequence.stats)
        return True

    def _enqueue(self, item: MediaItem) -> None:
        if not item.num_embeds:
            self._context.observations.count_eager_step("empty", model=self._name, kind="encoder")
            self.cache.fill(item.digest, self._empty(0))
            return
        self._pending[item.digest] = PendingItem(item, self._cut(item.digest, item, self._bucket_list[-1]))

    def _cut(self, digest: bytes, item: MediaItem, limit: Bucket, offset: int = 0) -> list[Part]:
        """Cuts an item, or a piece of one that starts at row `offset`, into parts as large as `limit` allows."""
        parts, end = [], offset
        for part in self._encoder.split(item, limit):
            parts.append(Part(digest, part, end, self._encoder.required([part])))
            end += part.num_embeds
        assert end == offset + item.num_embeds
        return parts

    def _empty(self, rows: int) -> Tensor:
        return torch.empty((rows, self._embeds_width), dtype=self._context.dtype, device=self._context.device)

    def release(self, sequence: ChatSequence, num_prefilled: int | None = None) -> None:
        """Unpins items that lie within the first `num_prefilled` positions, whose keys are written; None: all items."""
        for digest, last in list(sequence.pinned.items()):
            if num_prefilled is None or last < num_prefilled:
                del sequence.pinned[digest]
                if self.cache.unpin(digest):
                    self._pending.pop(digest, None)

    def embeds(self, sequence: ChatSequence, item: int) -> Tensor:
        """Embeddings of a pinned, encoded item: [num_embeds, embeds_width]."""
        embeds = self.cache.embeds(sequence.prompt.items[item].digest)
        assert embeds is not None
        return embeds

    def next_group(self, affords: Callable[[int], bool]) -> list[Part]:
        """The parts to encode next: the group that holds the oldest one. The others are packed again next time,
        together with new ones, so that groups with room left have time to fill.

        affords: whether a pass of that many patches may run. An item of many frames is cut until it fits; a part that
            cannot be cut is returned alone.
        """
        oldest = next(iter(self._pending.values()))
        # For a single picture that fits there is nothing to group or to cut.
        single = len(self._pending) == 1 == len(oldest.parts) and affords(self.patches(oldest.parts))
        if oldest.alone or single:
            return oldest.parts[:1]
        # Dense buckets, for one segment or for equal ones, hold no mixed group, and would cut an item into frames.
        captured = [bucket for bucket in self.runner.captured if key_of(bucket) not in self._dense]
        bucket_list = [bucket for bucket in captured or self._bucket_list if affords(bucket["patches"])]
        if not bucket_list:
            return oldest.parts[:1]
        if not affords(self.patches(oldest.parts[:1])):
            largest = max(bucket_list, key=cost_of)
            oldest.parts[:1] = self._cut(oldest.parts[0].digest, oldest.parts[0].item, largest, oldest.parts[0].offset)
        parts = [part for pending in self._pending.values() if not pending.alone for part in pending.parts][:_MAX_PARTS]
        group = pack([part.required for part in parts], bucket_list)[0]
        return [parts[index] for index in group.items]

    def patches(self, parts: Sequence[Part]) -> int:
        """Patches that a pass of these parts computes, the padding of a captured bucket included."""
        required = combine(part.required for part in parts)
        graph = self.runner.graph_for(required)
        return required["patches"] if graph is None else graph.bucket["patches"]

    def launch(self, parts: Sequence[Part]) -> Encoded | None:
        """Launches a pass over these parts. None when it failed and its items will be tried one by one; EncodeError
        when an item failed alone. A pass that runs out of memory has a second try before that."""
        launch = partial(self._launch_pass, parts)
        try:
            run, begun = with_second_try(launch, self._context, model=self._name, kind="encoder")
        except LaunchError as error:
            self._failed(parts, error)
            return None
        waiting = {stats for part in parts for stats in self._pending[part.digest].waiting}
        for part in parts:
            self._finish(part)
        return Encoded(run.route, begun, tuple(waiting))

    def _launch_pass(self, parts: Sequence[Part]) -> tuple[Run, Mark]:
        """The pass, and the mark before it."""
        with launch_errors(RepeatableLaunchError):
            plan = self._encoder.plan([part.item for part in parts])
            begun = mark(self._context.device)
            run = self.runner.run(plan)
            self._store(parts, run.outputs["embeds"])
        return run, begun

    def _store(self, parts: Sequence[Part], embeds: Tensor) -> None:
        """Copies the rows of each part to the embeddings of its item."""
        row = 0
        for part in parts:
            pending = self._pending[part.digest]
            if pending.embeds is None:
                pending.embeds = self._empty(pending.item.num_embeds)
            count = part.item.num_embeds
            pending.embeds[part.offset : part.offset + count] = embeds[row : row + count]
            row += count

    def observe(self, encoded: Encoded, seconds: float, ended: float) -> None:
        """Record how long a pass took: in the metrics and the statistics of its sequences. ended: when its results were
        read."""
        for stats in encoded.waiting:
            stats.add_encoder_pass(ended - seconds, ended)
        observations = self._context.observations
        observations.observe("vision_encode_duration_seconds", seconds, model=self._name, route=encoded.route)

    def _finish(self, part: Part) -> None:
        pending = self._pending[part.digest]
        pending.parts.remove(part)
        if not pending.parts:
            assert pending.embeds is not None
            self.cache.fill(part.digest, pending.embeds)
            del self._pending[part.digest]

    def _failed(self, parts: Sequence[Part], error: LaunchError) -> None:
        digests = frozenset(part.digest for part in parts)
        if len(digests) == 1:
            raise EncodeError(error, digests) from error
        log.warning("an encoder pass of %d items failed, each is tried alone: %s", len(digests), error.__cause__)
        for digest in digests:
            self._pending[digest].alone = True


def _with_patches(bucket_list: Sequence[Bucket], patches: int) -> Bucket:
    """A bucket with the operator's number of patches. Its other sizes are those of the next larger bucket, or those of
    the largest one, scaled up."""
    above = next((bucket for bucket in bucket_list if bucket["patches"] >= patches), None)
    if above is not None:
        return dict(above) | {"patches": patches}
    factor = -(-patches // bucket_list[-1]["patches"])
    return {name: size * factor for name, size in bucket_list[-1].items()} | {"patches": patches}
