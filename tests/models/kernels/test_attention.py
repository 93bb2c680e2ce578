"""The attention kernels against their references: segments, paged decode and paged prefill."""

from __future__ import annotations

import pytest
import torch

from models.layers.attention import paged_decode_attention, paged_prefill_attention, varlen_attention
from models.layers.fused import rotary_dense_attention
from tests.models.kernels.checking import relative_error, replayed, wide_in_place
from tests.support.slow import slow

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def segments(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def check_varlen(q, k, v, cu_q, cu_k, causal, *longest) -> None:
    """Rows behind the last segment become zero, whatever they and keys of no segment hold."""
    total = int(cu_q[-1])
    out = replayed(q.device, lambda: varlen_attention.kernel(q, k, v, cu_q, cu_k, causal, *longest))
    wide = (x.nan_to_num() for x in wide_in_place(q, k, v))
    reference = varlen_attention.reference(*wide, cu_q, cu_k, causal)
    assert not total or relative_error(out[:total], reference[:total]) < TOLERANCE[q.dtype]
    assert not out[total:].any()


def check_decode(q, k_cache, v_cache, tables, lengths, page, **how) -> None:
    scale = q.shape[-1] ** -0.5
    run = lambda: paged_decode_attention.kernel(q, k_cache, v_cache, tables, lengths, page, scale, **how)  # noqa: E731
    out = replayed(q.device, run)
    reference = paged_decode_attention.reference(*wide_in_place(q, k_cache, v_cache), tables, lengths, page, scale)
    assert relative_error(out, reference) < TOLERANCE[q.dtype]
    assert not out[lengths == 0].any()


def check_prefill(q, k_cache, v_cache, tables, cu_q, seq_lens, page, sequences, **how) -> torch.Tensor:
    """sequences: how many have chunks; those behind them are padding. Returns what comes out."""
    rows, scale = int(cu_q[-1]), q.shape[-1] ** -0.5
    given = (q, k_cache, v_cache, tables, cu_q, seq_lens, page, scale)
    out = replayed(q.device, lambda: paged_prefill_attention.kernel(*given, **how))
    few = (tables[:sequences], cu_q[: sequences + 1], seq_lens[:sequences], page, scale)
    reference = paged_prefill_attention.reference(*wide_in_place(q, k_cache, v_cache), *few)
    assert relative_error(out[:rows], reference[:rows]) < TOLERANCE[q.dtype]
    assert not out[rows:].any()
    return out


@pytest.mark.parametrize(
    ("width", "value_width", "heads", "kv_heads", "causal"),
    [(12, 12, 4, 2, False), slow(80, 80, 2, 2, False), slow(72, 72, 4, 4, True), (24, 16, 4, 2, True)],
)
def test_varlen_tiny(device, width, value_width, heads, kv_heads, causal) -> None:
    # Empty segments, a repeated tail, keys longer than queries, rows and poisoned keys of no segment.
    cu_q, cu_k = segments(5, 0, 40, 1, 0).to(device), segments(5, 0, 44, 3, 0).to(device)
    q = torch.randn(55, heads, width, device=device)
    k, v = torch.randn(60, kv_heads, width, device=device), torch.randn(60, kv_heads, value_width, device=device)
    k[52:], v[52:] = float("nan"), float("nan")
    check_varlen(q, k, v, cu_q, cu_k, causal)


@pytest.mark.parametrize("padding", [slow(0), slow(1), 40, slow(200)])
@pytest.mark.parametrize("lengths", [(32, 0, 20, 1, 32, 0, 0), slow((7,)), slow((0, 0))])
def test_varlen_of_short_segments(device, lengths, padding) -> None:
    """Each fits a tile; the rows behind them take further tiles, and more than there are programs for."""
    ends, total = segments(*lengths).to(device), sum(lengths)
    packed = torch.randn(total + padding, 6, 24, device=device)
    packed[total:] = float("nan")
    check_varlen(*packed.chunk(3, dim=1), ends, ends, False, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", [0, 1, 640])
def test_varlen_of_windows(padding, dtype) -> None:
    lengths = (64, 64, 36, 0, 4, *[64] * 40, 0)
    ends, total = segments(*lengths).to("cuda"), sum(lengths)
    packed = torch.randn(total + padding, 48, 80, device="cuda", dtype=dtype)
    packed[total:] = float("nan")
    check_varlen(*packed.chunk(3, dim=1), ends, ends, False, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "value_width", "heads", "kv_heads", "causal"),
    [
        (64, 64, 16, 16, False),
        (72, 72, 16, 16, False),
        (80, 80, 16, 16, False),
        (96, 96, 8, 8, False),
        (128, 128, 16, 2, True),
        (128, 128, 28, 4, True),
        (256, 256, 16, 4, True),
        (192, 128, 16, 16, True),
    ],
)
def test_varlen(width, value_width, heads, kv_heads, causal, dtype) -> None:
    device = torch.device("cuda")
    lengths = (300, 0, 1, 129, 64, 0, 700)
    cu_q = segments(*lengths, 0, 0).to(device)
    cu_k = segments(*(n + 37 if causal and n else n for n in lengths), 0, 0).to(device)
    total_q, total_k = int(cu_q[-1]), int(cu_k[-1])
    rows_q, rows_k = total_q + 77, total_k + 50
    q = torch.randn(rows_q, heads, width, device=device, dtype=dtype)
    k = torch.randn(rows_k, kv_heads, width, device=device, dtype=dtype)
    v = torch.randn(rows_k, kv_heads, value_width, device=device, dtype=dtype)
    q[total_q:], k[total_k:], v[total_k:] = (float("nan"),) * 3
    check_varlen(q, k, v, cu_q, cu_k, causal)


@pytest.mark.parametrize(
    ("width", "value_width", "heads", "kv_heads", "splits"),
    [(12, 12, 4, 2, None), slow(128, 128, 16, 2, 4), (40, 32, 4, 1, 3), slow(80, 64, 4, 1, 1)],
)
def test_paged_decode_tiny(device, width, value_width, heads, kv_heads, splits) -> None:
    page = 16
    q = torch.randn(4, heads, width, device=device)
    k_cache = torch.randn(40 * page, kv_heads, width, device=device)
    # One key head: the values are the first columns of the keys, as in multi-head latent attention.
    v_cache = k_cache[..., :value_width] if kv_heads == 1 else torch.randn_like(k_cache)
    tables = torch.randperm(39, device=device)[:32].view(4, 8).int() + 1
    lengths = torch.tensor([0, 1, 77, 128], dtype=torch.int32, device=device)
    check_decode(q, k_cache, v_cache, tables, lengths, page, splits=splits)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize(
    ("width", "value_width", "heads", "kv_heads"),
    [(128, 128, 16, 2), (128, 128, 12, 2), (128, 128, 28, 4), (128, 128, 32, 8), (96, 96, 8, 8), (576, 512, 16, 1)],
)
def test_paged_decode(rows, width, value_width, heads, kv_heads) -> None:
    device, dtype, page, pages = torch.device("cuda"), torch.bfloat16, 16, 96
    q = torch.randn(rows, heads, width, device=device, dtype=dtype)
    k_cache = torch.randn((rows * pages + 1) * page, kv_heads, width, device=device, dtype=dtype)
    v_cache = k_cache[..., :value_width] if kv_heads == 1 else torch.randn_like(k_cache)
    k_cache[:page], v_cache[:page] = float("nan"), float("nan")
    tables = (torch.randperm(rows * pages, device=device).int() + 1).view(rows, pages)
    lengths = torch.randint(0, pages * page + 1, (rows,), dtype=torch.int32, device=device)
    lengths[0] = pages * page if rows == 1 else 0
    check_decode(q, k_cache, v_cache, tables, lengths, page)


def paged_chunks(device: torch.device, lengths: list[tuple[int, int]], page: int, pages: int, padded: int = 0):
    """Block tables, ends of the packed chunks and lengths with the chunks, of (cached, new) tokens of each sequence;
    then `padded` sequences without a chunk."""
    tables = (torch.randperm(len(lengths) * pages) + 1).view(-1, pages).int()
    tables = torch.cat((tables, tables.new_zeros(padded, pages)))
    new = [new for _, new in lengths] + [0] * padded
    whole = [cached + new for cached, new in lengths] + [0] * padded
    return tables.to(device), segments(*new).to(device), torch.tensor(whole, dtype=torch.int32, device=device)


# One shape in `make test`, with one number of splits; the others in `make test-all`.
@pytest.mark.parametrize(
    ("width", "value_width", "heads", "kv_heads", "tile", "splits"),
    [
        (*shape, splits) if (shape[0], splits) == (24, 3) else slow(*shape, splits)
        for shape in ((12, 12, 4, 2, (16, 16, 4, 1)), (40, 24, 7, 1, (16, 32, 4, 1)), (24, 16, 3, 1, (16, 16, 4, 1)))
        for splits in (1, 2, 3, 5)
    ],
)
def test_paged_prefill_tiny(device, width, value_width, heads, kv_heads, tile, splits) -> None:
    """Fresh and continued chunks of ragged lengths, a whole page, one token; tiles of one share, of as many as there
    are splits and of fewer, and tiles whose first queries see no key of the last one; pages behind the ends, rows of no
    chunk and fresh memory hold NaN."""
    page, pages = 4, 32
    lengths = [(0, 9), (90, 1), (62, 5), (16, 16), (0, 40), (31, 6), (80, 40), (126, 2), (64, 1)]
    tables, cu_q, seq_lens = paged_chunks(device, lengths, page, pages, padded=2)
    rows = int(cu_q[-1])
    q = torch.randn(rows + 20, heads, width, device=device)
    k_cache = torch.full(((len(lengths) * pages + 1) * page, kv_heads, width), float("nan"), device=device)
    v_cache = torch.full((*k_cache.shape[:2], value_width), float("nan"), device=device)
    q[rows:] = float("nan")
    for table, length in zip(tables, seq_lens.tolist(), strict=True):
        held = (table.long()[:, None] * page + torch.arange(page, device=device)).flatten()[:length]
        k_cache[held] = torch.randn(length, kv_heads, width, device=device)
        v_cache[held] = torch.randn(length, kv_heads, value_width, device=device)
    if width == 24:  # multi-head latent attention
        v_cache = k_cache[..., :value_width]
    arguments, how = (tables, cu_q, seq_lens, page), {"tile": tile, "least_keys": tile[1]}
    out = check_prefill(q, k_cache, v_cache, *arguments, len(lengths), splits=splits, **how)
    # What one program reads has no other value for being launched among splits.
    whole = paged_prefill_attention.kernel(q, k_cache, v_cache, *arguments, width**-0.5, splits=1, **how)
    assert torch.equal(out[: lengths[0][1]], whole[: lengths[0][1]])


def test_rows_without_keys_become_zero_in_splits_too(device) -> None:
    """A graph's warm-up replays lengths of 0, and a length below its chunk's leaves the first queries without keys."""
    tables = torch.arange(1, 25, device=device, dtype=torch.int32).view(2, 12)
    cu_q, seq_lens = segments(3, 12).to(device), torch.tensor([0, 10], dtype=torch.int32, device=device)
    q, cache = torch.randn(15, 2, 16, device=device), torch.randn(100, 2, 16, device=device)
    run = lambda: paged_prefill_attention.kernel(  # noqa: E731
        q, cache, cache, tables, cu_q, seq_lens, 4, 0.25, tile=(16, 16, 4, 1), splits=3, least_keys=16
    )
    out = replayed(device, run)
    reference = paged_prefill_attention.reference(
        q.double(), cache.double(), cache.double(), tables, cu_q, seq_lens, 4, 0.25
    )
    assert not out[:5].any()
    assert relative_error(out[5:], reference[5:]) < TOLERANCE[q.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 1, 16])
@pytest.mark.parametrize(
    ("width", "value_width", "heads", "kv_heads"), [(128, 128, 12, 2), (128, 128, 28, 4), (576, 512, 16, 1)]
)
def test_a_short_chunk_behind_a_long_context(width, value_width, heads, kv_heads, splits) -> None:
    """Beside a fresh chunk and one of one row; twice the same, and as the eager launch."""
    device, dtype, page, pages = torch.device("cuda"), torch.bfloat16, 16, 1875
    tables, cu_q, seq_lens = paged_chunks(device, [(28_000, 100), (0, 27), (20_000, 1)], page, pages, padded=61)
    rows = int(cu_q[-1])
    q = torch.randn(rows + 16, heads, width, device=device, dtype=dtype)
    k_cache = torch.randn((3 * pages + 1) * page, kv_heads, width, device=device, dtype=dtype)
    v_cache = k_cache[..., :value_width] if kv_heads == 1 else torch.randn_like(k_cache)
    q[rows:], k_cache[:page], v_cache[:page] = (float("nan"),) * 3
    arguments = (q, k_cache, v_cache, tables, cu_q, seq_lens, page)
    out = check_prefill(*arguments, 3, splits=splits)
    assert torch.equal(out, paged_prefill_attention.kernel(*arguments, width**-0.5, splits=splits))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "value_width", "heads", "kv_heads"),
    [(128, 128, 12, 2), (128, 128, 28, 4), (128, 128, 32, 8), (96, 96, 8, 8), (256, 256, 16, 4), (576, 512, 16, 1)],
)
def test_paged_prefill(width, value_width, heads, kv_heads, dtype) -> None:
    device, page, pages = torch.device("cuda"), 16, 96
    lengths = [(0, 300), (700, 1), (1024, 129), (16, 64), (0, 1), (1111, 333)]
    tables, cu_q, seq_lens = paged_chunks(device, lengths, page, pages, padded=58)
    rows = int(cu_q[-1])
    q = torch.randn(rows + 77, heads, width, device=device, dtype=dtype)
    k_cache = torch.randn((len(lengths) * pages + 1) * page, kv_heads, width, device=device, dtype=dtype)
    v_cache = k_cache[..., :value_width] if kv_heads == 1 else torch.randn_like(k_cache)
    q[rows:], k_cache[:page], v_cache[:page] = (float("nan"),) * 3
    check_prefill(q, k_cache, v_cache, tables, cu_q, seq_lens, page, len(lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [2, 16, 128])
@pytest.mark.parametrize("length", [5, 11])
def test_local_attention_at_size(sequences, length) -> None:
    device = torch.device("cuda")
    qkv = torch.randn(sequences, length, 20, 128, device=device, dtype=torch.bfloat16)
    q, k, v = qkv.split((16, 2, 2), dim=2)
    angles = torch.rand(length, 64, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    out = replayed(device, lambda: rotary_dense_attention.kernel(q, k, v, cos, sin, 0))
    reference = rotary_dense_attention.reference(*wide_in_place(q, k, v, cos, sin), 0)
    assert relative_error(out, reference) < TOLERANCE[q.dtype]
