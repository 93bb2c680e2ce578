"""Low-rank adapters of a model in slots: which layers they change, and the device memory that holds those in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from models.layers.lora import LoraLayer, LoraPair, LoraRows, StackLora, add_lora

_ALIGNMENT = 128
"""Every tensor of a slot begins at a multiple of this number of elements, for wide loads."""


@dataclass(frozen=True)
class LoraPlace:
    """Linear layers by their published names, with `inputs` inputs each; their outputs, `widths`, lie one after the
    other. group: an adapter changes all places of a group or none."""

    group: str
    names: tuple[str, ...]
    inputs: int
    widths: tuple[int, ...]

    @property
    def outputs(self) -> int:
        return sum(self.widths)


class LoraLayout:
    """Where the tensors of an adapter lie in its slot: those of the places of some groups, with ranks padded to `rank`,
    a power of two from 16 on."""

    def __init__(self, places: Mapping[str, LoraPlace], groups: Iterable[str], rank: int) -> None:
        kept = set(groups)
        self.rank = rank
        self.places = {key: place for key, place in places.items() if place.group in kept}
        self._offsets: dict[str, tuple[int, int]] = {}
        """Where A and B begin."""
        end = 0
        for key, place in self.places.items():
            a = end
            b = _aligned(a + prod(self._a_shape(place)))
            end = _aligned(b + place.outputs * rank)
            self._offsets[key] = a, b
        self.size = end
        """Elements of a slot."""

    def _a_shape(self, place: LoraPlace) -> tuple[int, int]:
        return len(place.names) * self.rank, place.inputs

    def flatten(self, tensors: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> Tensor:
        """An adapter's tensors by published name, NAME.lora_A [r, in] and NAME.lora_B [out, r] -> a slot [size]; scale:
        alpha / r, multiplied into B in float32."""
        slot = torch.zeros(self.size, dtype=dtype)
        for key, place in self.places.items():
            pair, first = self._views(slot[None], key, place), 0
            for part, (name, width) in enumerate(zip(place.names, place.widths, strict=True)):
                a, b = tensors.get(f"{name}.lora_A"), tensors.get(f"{name}.lora_B")
                if a is not None and b is not None:
                    rank = a.shape[0]
                    pair.a[0, part * self.rank : part * self.rank + rank] = a.to(dtype)
                    pair.b[0, first : first + width, :rank] = (b.float() * scale).to(dtype)
                first += width
        return slot

    def pairs(self, table: Tensor) -> dict[str, LoraPair]:
        """Views of slots [slots, size] by place."""
        return {key: self._views(table, key, place) for key, place in self.places.items()}

    def _views(self, table: Tensor, key: str, place: LoraPlace) -> LoraPair:
        (a, b), (height, inputs) = self._offsets[key], self._a_shape(place)
        return LoraPair(
            table[:, a : a + height * inputs].unflatten(1, (height, inputs)),
            table[:, b : b + place.outputs * self.rank].unflatten(1, (place.outputs, self.rank)),
            place.widths,
        )


class LoraBank:
    """The slots, [slots, size] in one block at a fixed address, so that an adapter is loaded with one copy."""

    def __init__(self, layout: LoraLayout, num_slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.layout = layout
        self.table = torch.zeros((num_slots, layout.size), device=device, dtype=dtype)
        self._pairs = layout.pairs(self.table)

    @property
    def num_slots(self) -> int:
        return self.table.shape[0]

    def pair(self, key: str) -> LoraPair | None:
        return self._pairs.get(key)

    @cached_property
    def stacks(self) -> Mapping[str, Sequence[LoraLayer]]:
        """Layers by stack; a stack that no adapter changes is missing."""
        stacks: dict[str, list[LoraLayer]] = {}
        for key, pair in self._pairs.items():
            if key.endswith(".qkv"):
                name, layer, _ = key.split(".")
                stacks.setdefault(name, []).append(LoraLayer(pair, self._pairs[f"{name}.{layer}.out"]))
        return stacks


@dataclass(frozen=True, eq=False)
class Lora:
    """The slots and which of them the rows of a batch use."""

    bank: LoraBank
    rows: LoraRows

    def stack(self, name: str) -> StackLora | None:
        layers = self.bank.stacks.get(name)
        return None if layers is None else StackLora(layers, self.rows)

    def project(self, name: str, y: Tensor, x: Tensor) -> Tensor:
        """Adds the adapters of projection `name` to its output y for the input x, in place; returns y."""
        pair = self.bank.pair(name)
        return y if pair is None else add_lora(y, x, pair, self.rows)

    def twice(self) -> Lora:
        """The adapters of a batch that holds the same units twice, one after the other."""
        return Lora(self.bank, self.rows.twice())


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT
