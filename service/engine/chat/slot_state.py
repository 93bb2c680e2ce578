"""What the device holds for every running chat sequence: tables indexed by request slot.

A decode step reads and writes these by index; the host writes a row when its sequence is admitted and adds pages to
its block table. Row 0 is scratch: it is never active.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import chain

import torch
from torch import Tensor

from models.interfaces.capturable import BufferSpec
from service.link.sampling import MAX_BIASES, MAX_STOP_IDS, SamplingOptions, SamplingParams


class IntColumn(IntEnum):
    """Columns of SlotState.ints. Those of sampling are named as their fields of SamplingParams."""

    TOKEN = 0
    """The next input token."""
    LENGTH = 1
    """Number of keys in the cache, and so the index of the next one."""
    POSITION = 2
    """Rotary position (all axes) of TOKEN."""
    GENERATED = 3
    """Tokens sampled so far; the counter of the random numbers."""
    ACTIVE = 4
    SEED = 5
    MIN_TOKENS = 6
    TOP_K = 7
    STATE = 8
    """Of models with recurrent state, the row that holds the sequence's."""
    SPARE = 9
    """Its other row, which the step at the next multiple of STATE_INTERVAL positions writes and swaps with STATE."""
    STATED = 10
    """With drafts, the number of tokens whose state STATE holds; the inputs of the others are in SlotState.pending."""
    LIMIT = 11
    """Maximum of GENERATED; a step that verifies drafts stops there."""


SAMPLED_INTS = [column for column in IntColumn if column.name.lower() in SamplingOptions.__struct_fields__]
_NEUTRAL = SamplingParams(max_tokens=1, temperature=0.0)


class SlotState:
    """Tables of num_slots + 1 rows.

    ints int64 [rows, len(IntColumn)], floats float32 [rows, len(FloatColumn)], stop_ids int64 [rows, MAX_STOP_IDS] (-1
    where unused), block_tables int32 [rows, max_pages]; for the sampler with penalties and filters bias_ids int64 and
    bias_values float32 [rows, MAX_BIASES], prompt_seen bool and output_counts int32 [rows, vocabulary].

    Two tables are not by slot, but of a step with guided rows (service.engine.chat.guided.guidance.MaskTable).
    allowed int32 [rows, ceil(vocabulary / 32)]: masks, bit i % 32 of word i // 32 for token i; row 0 allows every
    token. sampled int64 [2, rows]: slot and row of `allowed` of each row of the step, 0 in padding.

    Nor are the recurrent states (models.layers.kv_cache.StateRows.layers), whose rows the columns STATE and SPARE name.

    With drafts also pending, the tables of StateRows.inputs; for prompt lookup history int32 [rows, positions], the
    known tokens (position LENGTH is TOKEN); for a model with a drafter drafts int64 [rows, drafts] of its next step, -1
    for none.
    """

    def __init__(
        self,
        num_slots: int,
        max_pages: int,
        vocab_size: int,
        device: torch.device,
        states: Sequence[Mapping[str, Tensor]] = (),
        pending: Sequence[Mapping[str, Tensor]] = (),
        drafts: int = 0,
        history: int = 0,
    ) -> None:
        """states: empty for models without recurrent state. pending: empty without drafts. drafts: of a step, 0 for
        none. history: its positions, 0 without prompt lookup."""
        self.states, self.pending = states, pending
        rows = num_slots + 1
        self.drafts = torch.full((rows, drafts), -1, dtype=torch.int64, device=device)
        self.history = torch.zeros((rows, history), dtype=torch.int32, device=device)
        self.ints = torch.zeros((rows, len(IntColumn)), dtype=torch.int64, device=device)
        self.floats = torch.tensor(_NEUTRAL.floats(), device=device).repeat(rows, 1)
        self.stop_ids = torch.full((rows, MAX_STOP_IDS), -1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros((rows, max_pages), dtype=torch.int32, device=device)
        self.bias_ids = torch.zeros((rows, MAX_BIASES), dtype=torch.int64, device=device)
        self.bias_values = torch.zeros((rows, MAX_BIASES), dtype=torch.float32, device=device)
        self.prompt_seen = torch.zeros((rows, vocab_size), dtype=torch.bool, device=device)
        self.output_counts = torch.zeros((rows, vocab_size), dtype=torch.int32, device=device)
        self.sampled = torch.zeros((2, rows), dtype=torch.int64, device=device)
        self.allowed = torch.full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables but the recurrent states."""
        tables = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return sum(table.nbytes for table in chain(tables, *(layer.values() for layer in self.pending)))


def allocate_layers(
    layers: Sequence[Mapping[str, BufferSpec]], rows: int, device: torch.device
) -> list[dict[str, Tensor]]:
    """The tables of each layer with recurrent state, zeros [rows, *shape]."""
    return [
        {name: torch.zeros((rows, *spec.shape), dtype=spec.dtype, device=device) for name, spec in specs.items()}
        for specs in layers
    ]


def row_bytes(layers: Sequence[Mapping[str, BufferSpec]]) -> int:
    """Bytes of a row of all tables together."""
    specs = [spec for layer in layers for spec in layer.values()]
    return sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in specs)
