"""The decode kernel that norms, rotates, stores the new token and attends to it; reference: rotate_and_cache, then the
decode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.layers.attention import paged_decode_attention, rotary_paged_decode_attention
from models.layers.kernels.paged_decode import CurrentKV
from models.layers.norms import QKNorm, rms_norm
from models.layers.rotary import rotate_half_split
from tests.models.kernels.checking import relative_error, replayed, wide_in_place
from tests.support.slow import slow

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Step:
    """Arguments of the function under test. Cache rows that nothing may read hold NaN, those to be written too."""

    q: Tensor
    k: Tensor
    v: Tensor
    rotary: tuple[Tensor, Tensor] | None
    qk_norm: QKNorm | None
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    tables: Tensor
    lengths: Tensor
    page: int

    def run(self, **options: Any) -> Tensor:
        return paged_decode_attention.kernel(
            self.q,
            self.k_cache,
            self.v_cache,
            self.tables,
            self.lengths,
            self.page,
            self.q.shape[2] ** -0.5,
            current_kv=CurrentKV(self.k, self.v, self.rotary, self.slots, self.qk_norm),
            **options,
        )


def make_step(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    width: int,
    *,
    page: int = 16,
    pages: int = 8,
    rotate: bool = True,
    norm: bool = False,
    packed: bool = True,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Shuffled pages; where two rows are longer than a page, the last two share their first one, as a prefix cache has
    it. packed: q, k and v are views of one projection."""
    rows = len(lengths)
    tables = (torch.randperm(rows * pages) + 1).view(rows, pages).int()
    long = [row for row, length in enumerate(lengths) if length > page]
    if len(long) > 1:
        tables[long[-1], 0] = tables[long[-2], 0]
    caches = torch.full((2, (rows * pages + 1) * page, kv_heads, width), float("nan"))
    slots = torch.zeros(rows, dtype=torch.int64)
    for row, length in enumerate(lengths):
        positions = torch.arange(length)
        slot_mapping = tables[row, positions // page].long() * page + positions % page
        caches[:, slot_mapping[:-1]] = torch.randn(2, max(length - 1, 0), kv_heads, width)
        if length:
            slots[row] = slot_mapping[-1]
    q, k, v = torch.randn(rows, heads + 2 * kv_heads, width).split((heads, kv_heads, kv_heads), dim=1)
    angles = 6 * torch.rand(rows, width // 2, device=device)
    qkv = torch.cat((q, k, v), dim=1).to(device, dtype).split((heads, kv_heads, kv_heads), dim=1)
    q, k, v = qkv if packed else (x.contiguous() for x in qkv)
    k_cache, v_cache = caches.to(device, dtype)
    rotary = (angles.cos(), angles.sin()) if rotate else None
    lengths_there = torch.tensor(lengths, dtype=torch.int32, device=device)
    weights = torch.randn(2, width, device=device, dtype=dtype)
    qk_norm = QKNorm(*weights, 1e-5) if norm else None
    return Step(q, k, v, rotary, qk_norm, k_cache, v_cache, slots.to(device), tables.to(device), lengths_there, page)


def check(step: Step, **options: Any) -> None:
    before = step.k_cache.clone(), step.v_cache.clone()
    out = replayed(step.q.device, lambda: step.run(**options))
    q, k, v, k_cache, v_cache = wide_in_place(step.q, step.k, step.v, *before)
    qk_norm, keys = step.qk_norm, step.k
    if qk_norm is not None:
        keys = rms_norm.reference(keys, qk_norm.k, qk_norm.eps)
        qk_norm = QKNorm(*wide_in_place(qk_norm.q, qk_norm.k), qk_norm.eps)
    reference = rotary_paged_decode_attention.reference(
        q, k, v, step.rotary, k_cache, v_cache, step.slots, step.tables, step.lengths, step.page, qk_norm
    )
    active = step.lengths > 0
    assert not out[~active].any()
    if active.any():
        assert relative_error(out, reference) < TOLERANCE[step.q.dtype]
    keys = keys if step.rotary is None else rotate_half_split(keys, *step.rotary)
    written = step.slots[active]
    if qk_norm is not None:
        # A last bit of the norm can move a rounding, whose share of a value is any where the rotation's terms cancel.
        assert not active.any() or relative_error(step.k_cache[written], keys[active]) < TOLERANCE[keys.dtype]
        keys = step.k_cache.index_select(0, step.slots)
    for cache, old, new in ((step.k_cache, before[0], keys), (step.v_cache, before[1], step.v)):
        expected = old.index_copy(0, written, new[active])
        tolerance = 0.0 if new is step.v or step.rotary is None else torch.finfo(cache.dtype).eps
        # Page 0 is scratch: rows of length 0 may write there.
        torch.testing.assert_close(cache[step.page :], expected[step.page :], rtol=tolerance, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "splits", "rotate", "norm", "page"),
    [
        (12, 4, 2, None, True, False, 16),
        slow(8, 3, 1, 5, True, True, 8),
        slow(20, 12, 2, 1, False, False, 32),
        slow(64, 2, 2, 1, True, True, 16),
        slow(72, 6, 1, 3, True, False, 16),
        (80, 8, 1, 2, True, True, 8),
        slow(128, 12, 2, 4, True, True, 16),
        (128, 8, 1, 2, False, False, 32),
        slow(72, 2, 2, 1, False, True, 16),
        slow(256, 8, 2, 2, True, True, 16),
    ],
)
def test_lengths_around_pages_and_blocks(device, width, heads, kv_heads, splits, rotate, norm, page) -> None:
    lengths, sizes = [0, 1, 16, 17, 32, 33, 128], {"page": page, "pages": 128 // page}
    step = make_step(lengths, heads, kv_heads, width, **sizes, rotate=rotate, norm=norm, device=device)
    check(step, splits=splits)


def test_heads_of_their_own(device) -> None:
    """Queries and keys that are no views of the projection."""
    check(make_step([20, 0, 64], 6, 1, 24, packed=False, device=device), splits=2)


def test_padded_rows_leave_each_other_alone(device) -> None:
    """A slot that ended may stand in a step twice, and padding points at the scratch slot; both have length 0."""
    step = make_step([0, 0, 0], 4, 2, 16, device=device)
    step = replace(step, slots=torch.zeros_like(step.slots), tables=torch.zeros_like(step.tables))
    check(step, splits=2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "rotate", "norm"),
    [
        (256, 16, 4, True, True),
        (256, 32, 2, True, True),
        (128, 16, 2, True, False),
        (128, 16, 2, False, False),
        (128, 12, 2, True, False),
        (128, 28, 4, True, False),
        (128, 16, 8, True, True),
        (128, 32, 8, True, True),
        (128, 32, 4, True, True),
        (96, 8, 8, True, False),
        (80, 8, 1, True, True),
        (72, 6, 6, True, False),
        (64, 16, 2, True, False),
    ],
)
def test_sizes_of_the_models(rows, width, heads, kv_heads, rotate, norm, dtype) -> None:
    device, page, pages = torch.device("cuda"), 16, 96
    lengths = torch.randint(0, pages * page + 1, (rows,)).tolist()
    lengths[:8] = [pages * page, 0, 1, 16, 17, 64, 65, 513][:rows]
    sizes = {"page": page, "pages": pages, "rotate": rotate, "norm": norm}
    check(make_step(lengths, heads, kv_heads, width, **sizes, device=device, dtype=dtype))


@pytest.mark.gpu
def test_the_order_of_programs_changes_nothing() -> None:
    device = torch.device("cuda")
    step = make_step([700, 1, 0, 64, 1000] * 4, 12, 2, 128, pages=64, device=device, dtype=torch.bfloat16)
    outs = [step.run(splits=16) for _ in range(50)]
    assert all(torch.equal(out, outs[0]) for out in outs)
