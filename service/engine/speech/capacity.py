"""Room for streams: request slots and pages of the cache, which the streams of a voice share; and the adapters on the
device.

A stream keeps its room from admission to release, with one exception: while it has no text to speak and every result of
its steps has been read, but for overrun rows, it is preempted if others need the room. What it needs to go on is on the
host, so it waits for room once more when there is text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch

from models.checkpoints.lora_files import LoraFile, layout_of, read, survey
from models.checkpoints.lora_folders import adapter_folders
from models.layers.adapters import LoraBank, LoraLayout
from models.protocol import SpeechModel
from service.engine.core.pages import PagePool, SlotPool, pages_for
from service.engine.speech.stream import PageCopy, Phase, Stream
from service.link.config import EngineConfig


class AdapterFiles:
    """The checked adapters of a directory, if one is configured, all of which are on the device, and the layout of a
    slot that can hold any of them. slots: by name."""

    def __init__(self, config: EngineConfig, model: SpeechModel) -> None:
        """Raises CheckpointError, which names the file and what is wrong with it."""
        places = model.lora_places()
        folders = adapter_folders(Path(config.lora_voices)) if config.lora_voices else ()
        self._files: dict[str, LoraFile] = {folder.name: survey(folder, places) for folder in folders}
        self._layout: LoraLayout | None = layout_of(list(self._files.values()), places) if self._files else None
        self.slots = {name: slot for slot, name in enumerate(self._files)}

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the slots on the device."""
        return 0 if self._layout is None else len(self.slots) * self._layout.size * dtype.itemsize

    def bank(self, device: torch.device, dtype: torch.dtype) -> LoraBank | None:
        """New slots; None if there are no adapters."""
        return None if self._layout is None else LoraBank(self._layout, len(self.slots), device, dtype)

    def load(self, bank: LoraBank | None) -> None:
        """Copy the adapters to their slots. CheckpointError for values that are not finite."""
        if bank is not None and self._layout is not None:
            for name, file in self._files.items():
                bank.table[self.slots[name]].copy_(read(file, self._layout, bank.table.dtype))


class Room:
    """running: streams that have room; preempted: those that had some and may want it again."""

    def __init__(self, max_streams: int, pages: PagePool) -> None:
        self.pages = pages
        self.running: list[Stream] = []
        self.preempted: list[Stream] = []
        self.on_preemption: Callable[[], None] = lambda: None
        """Called for each stream that is preempted."""
        self._slots = SlotPool(max_streams)

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
        """Whether so many slots and pages are free, perhaps after idle streams were preempted, those that have been
        idle longest first. None is in vain, where those who speak hold too much."""

        def enough() -> bool:
            return self._slots.num_free >= slots and self.pages.num_available >= pages

        if enough():
            return True
        most_slots, most_pages = self._most()
        if slots > most_slots or pages > most_pages:
            return False
        while not enough() and (idle := self._idle):
            self._take_room(min(idle, key=lambda one: one.last_launch))
        return enough()

    def _take_room(self, stream: Stream) -> None:
        self.release(stream)
        self.preempted.append(stream)
        stream.phase = Phase.PREEMPTED
        self.on_preemption()

    def admit(self, streams: Sequence[Stream]) -> None:
        """A slot each, and pages up to the length cap, where there is room. What was found of their voices is shared
        before any page is evicted."""
        sources = [self._share_voice(stream) for stream in streams]
        for stream, source in zip(streams, sources, strict=True):
            begun = len(stream.pages)
            stream.pages += self.pages.allocate(self.pages_for(stream.positions) - begun)
            # A source may be evicted here, and given away: a launch reads all of them before it writes anything.
            stream.page_copy = None if source is None else PageCopy(source, stream.pages[begun])
            self.running.append(stream)
            stream.slot = self._slots.allocate()
            stream.phase = Phase.PREFILL

    def look_up_voice(self, stream: Stream) -> None:
        """Notes how much of a waiting stream's prompt is in the cache now: of its voice."""
        found = stream.voice[: self.pages.match([page.digest for page in stream.voice])]
        stream.prefilled = sum(page.positions for page in found)
        stream.patches_before = sum(page.patches for page in found)

    def _share_voice(self, stream: Stream) -> int | None:
        """Gives a stream the full pages that were found, and returns the one that it must copy."""
        found = [page.digest for page in stream.voice[: self.pages_for(stream.prefilled)]]
        stream.pages = self.pages.share(found)
        if not stream.prefilled % self.pages.page_size:
            return None
        source = stream.pages.pop()
        self.pages.release([source])
        return source

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
        stream.slot, stream.pages = 0, []
