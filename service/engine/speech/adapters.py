"""Adapters of a speech model: all of them in the host's memory, those in use in slots on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoints.lora_files import LoraFile, layout_of, read, survey
from models.checkpoints.lora_folders import adapter_folders
from models.layers.adapters import LoraBank, LoraLayout
from models.protocol import SpeechModel
from service.engine.core.pages import PagePool
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
