"""Room for streams: request slots, pages of the cache, and slots of adapters.

A stream keeps its room from admission to release, with one exception: while it has no text to speak and every result of
its steps has been read, but for overrun rows, it is preempted if others need the room. What it needs to go on is on the
host, so it waits for room once more when there is text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoints.lora_files import LoraFile, layout_of, read, survey
from models.checkpoints.lora_folders import adapter_folders
from models.layers.adapters import LoraBank, LoraLayout
from models.protocol import SpeechModel
from service.engine.core.pages import PagePool, SlotPool, pages_for
from service.engine.speech.references import VoicePages
from service.engine.speech.stream import Phase, Stream
from service.link.config import EngineConfig


class AdapterSlots:
    """Which adapter is in which slot. An adapter in use stays; of the others, the one that was used longest ago is
    replaced. load: copies an adapter into a slot, in the order of launches.
    """

    def __init__(self, num_slots: int, load: Callable[[str, int], None]) -> None:
        self.num_slots = num_slots
        self._load = load
        self._pages = PagePool(num_slots + 1, page_size=1)
        """An adapter is a page: slot n is page n + 1, since page 0 is scratch."""

    def __contains__(self, name: str) -> bool:
        """Whether the adapter is in a slot."""
        return name.encode() in self._pages

    def acquire(self, name: str) -> int:
        """The adapter's slot, for one more stream; the adapter is loaded if it is not in one. OutOfPages if all are in
        use."""
        if name in self:
            return self._pages.share([name.encode()])[0] - 1
        (page,) = self._pages.allocate(1)
        self._load(name, page - 1)
        self._pages.index(page, name.encode())
        return page - 1

    def release(self, slot: int) -> None:
        """Releases the slot for a stream that has ended."""
        self._pages.release([slot + 1])


class AdapterFiles:
    """The checked adapters of a directory, and the layout of a slot that can hold any of them."""

    def __init__(self, config: EngineConfig, model: SpeechModel) -> None:
        """Raises CheckpointError, which names the file and what is wrong with it."""
        places = model.lora_places()
        self.files: dict[str, LoraFile] = {
            folder.name: survey(folder, places) for folder in adapter_folders(Path(config.lora_voices))
        }
        self.layout: LoraLayout | None = layout_of(list(self.files.values()), places) if self.files else None
        self.num_slots = min(config.lora_slots, len(self.files))
        self._host: dict[str, Tensor] = {}

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the slots on the device."""
        return 0 if self.layout is None else self.num_slots * self.layout.size * dtype.itemsize

    def read(self, dtype: torch.dtype, *, pinned: bool) -> None:
        """Reads all adapters into the host's memory. CheckpointError for values that are not finite."""
        if self.layout is None:
            return
        for name, file in self.files.items():
            slot = read(file, self.layout, dtype)
            self._host[name] = slot.pin_memory() if pinned else slot

    def bank(self, device: torch.device, dtype: torch.dtype) -> LoraBank | None:
        """New slots; None if there are no adapters."""
        return None if self.layout is None else LoraBank(self.layout, self.num_slots, device, dtype)

    def slots(self, bank: LoraBank | None, loaded: Callable[[], None]) -> AdapterSlots:
        """loaded: called each time an adapter was copied to the device."""

        def load(name: str, slot: int) -> None:
            assert bank is not None
            # On the stream of the steps: steps launched before read the old adapter, steps launched after the new one.
            bank.table[slot].copy_(self._host[name], non_blocking=True)
            loaded()

        return AdapterSlots(self.num_slots, load)


class Room:
    """running: streams that have room; preempted: those that had some and may want it again."""

    def __init__(self, max_streams: int, pages: PagePool, adapters: AdapterSlots | None) -> None:
        self.pages = pages
        self.voices = VoicePages(pages)
        self.running: list[Stream] = []
        self.preempted: list[Stream] = []
        self.on_preemption: Callable[[], None] = lambda: None
        """Called for each stream that is preempted."""
        self._slots = SlotPool(max_streams)
        self._adapters = adapters

    @property
    def speaking(self) -> list[Stream]:
        return [stream for stream in self.running if stream.has_text]

    @property
    def _idle(self) -> list[Stream]:
        return [stream for stream in self.running if not stream.has_text]

    def pages_for(self, positions: int) -> int:
        return pages_for(positions, self.pages.page_size)

    def fits_cache(self, positions: int) -> bool:
        """Whether the cache holds so many positions when it is empty."""
        return self.pages_for(positions) < self.pages.num_pages

    def missing(self, streams: Iterable[Stream]) -> tuple[int, int]:
        """Slots and pages that these streams need together beyond those that are free or could be; at most 0 if
        none."""
        needed, (slots, pages) = [self.pages_for(stream.positions) for stream in streams], self._most()
        return len(needed) - slots, sum(needed) - pages

    def _most(self) -> tuple[int, int]:
        """Slots and pages that are free or could be. A page that idle streams share counts once, and not at all if one
        that speaks has it, too."""
        idle = self._idle
        freed = self.pages.num_freed_by(chain.from_iterable(stream.pages for stream in idle))
        return self._slots.num_free + len(idle), self.pages.num_available + freed

    def make_room(self, slots: int, pages: int) -> bool:
        """Whether so many slots and pages are free, perhaps after idle streams were preempted. None is in vain, where
        those who speak hold too much."""

        def enough() -> bool:
            return self._slots.num_free >= slots and self.pages.num_available >= pages

        if enough():
            return True
        most_slots, most_pages = self._most()
        return slots <= most_slots and pages <= most_pages and self._preempt(enough)

    def make_adapter_room(self, names: Collection[str]) -> bool:
        """Whether these adapters and those in use can be resident together, perhaps after the same."""
        adapters = self._adapters
        if adapters is None or self._adapters_fit(names):
            return True
        kept = {*names, *(stream.adapter for stream in self.speaking)} - {""}
        if len(kept) > adapters.num_slots:
            return False
        return self._preempt(lambda: self._adapters_fit(names), kept={*kept, ""})

    def _adapters_fit(self, coming: Collection[str]) -> bool:
        """Whether these adapters and those in use can be in slots together."""
        used = {*coming, *(stream.adapter for stream in self.running)} - {""}
        return self._adapters is None or len(used) <= self._adapters.num_slots

    def _preempt(self, enough: Callable[[], bool], *, kept: Collection[str] = ()) -> bool:
        """Those that have been idle longest go first. kept: adapters of streams whose room is of no use ("": none)."""
        while not enough():
            idle = [stream for stream in self._idle if stream.adapter not in kept]
            if not idle:
                return False
            self._take_room(min(idle, key=lambda one: one.last_launch))
        return True

    def _take_room(self, stream: Stream) -> None:
        self.release(stream)
        self.preempted.append(stream)
        stream.phase = Phase.PREEMPTED
        self.on_preemption()

    def admit(self, streams: Sequence[Stream]) -> None:
        """A slot each, pages up to the length cap, and the adapter, where there is room."""
        self.voices.allocate(streams)
        for stream in streams:
            self.running.append(stream)
            stream.slot = self._slots.allocate()
            if stream.adapter and self._adapters is not None:
                stream.adapter_slot = self._adapters.acquire(stream.adapter)
            stream.phase = Phase.PREFILL

    def reserve(self, stream: Stream, positions: int) -> bool:
        """Pages for a longer segment that was appended. False when there is no room. An idle stream for which there is
        none beside the others is preempted itself, and waits for all of its pages."""
        more = self.pages_for(positions) - len(stream.pages)
        if not self.fits_cache(positions):
            return False
        if stream in self.running and more > 0:
            if not self.make_room(0, more):
                if stream.has_text:
                    return False
                self._take_room(stream)
            if stream in self.running:
                stream.pages.extend(self.pages.allocate(more))
        stream.positions = max(stream.positions, positions)
        return True

    def release(self, stream: Stream) -> None:
        """What it frees may be given away at once: launches run in order, so the next owner's writes come after those
        of steps in flight."""
        if stream.phase is Phase.PREEMPTED:
            self.preempted.remove(stream)
            return
        self.running.remove(stream)
        self._slots.release(stream.slot)
        self.pages.release(stream.pages)
        if stream.adapter and self._adapters is not None:
            self._adapters.release(stream.adapter_slot)
        stream.slot, stream.pages, stream.adapter_slot = 0, [], -1
