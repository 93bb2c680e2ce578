"""Which buckets a list has, and which of them holds a call at the least cost."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from models.interfaces.capturable import EXACT, Bucket
from service.graphs.buckets import cheapest, chosen_buckets, fits, row_buckets, spanning

BUCKETS: list[Bucket] = [{"patches": p, "sequences": p // 8, "max_seqlen": p} for p in (256, 512, 1024, 4096)]


@given(st.integers(1, 5000), st.integers(1, 600), st.integers(1, 5000))
def test_cheapest_is_the_smallest_bucket_that_holds_every_size(patches: int, sequences: int, longest: int) -> None:
    needed = {"patches": patches, "sequences": sequences, "max_seqlen": longest}
    chosen = cheapest(reversed(BUCKETS), needed)
    fitting = [
        c for c in BUCKETS if c["patches"] >= patches and c["sequences"] >= sequences and c["max_seqlen"] >= longest
    ]
    assert chosen == (fitting[0] if fitting else None)


def test_an_exact_bucket_holds_its_own_sizes_only() -> None:
    sizes = {"patches": 1024, "sequences": 1, "max_seqlen": 1024}
    exact = sizes | {EXACT: 1}
    assert fits(exact, sizes)
    assert not fits(exact, sizes | {"patches": 1020, "max_seqlen": 1020})
    assert not fits(exact, sizes | {"patches": 1028})
    assert not fits(exact, sizes | {"sequences": 2, "max_seqlen": 512})
    assert not fits(exact, {"patches": 1024})


@given(st.integers(1, 400))
def test_batch_sizes_waste_at_most_half_and_little_when_large(largest: int) -> None:
    bucket_list = row_buckets(largest)
    assert bucket_list[-1] == largest and bucket_list == sorted(set(bucket_list))
    for rows in range(9, largest + 1):
        bucket = next(size for size in bucket_list if size >= rows)
        assert (bucket - rows) / bucket < 1 / 3


@given(st.lists(st.tuples(st.integers(1, 2000), st.booleans()), min_size=1))
def test_few_buckets_hold_what_any_of_a_list_holds(sizes: list[tuple[int, bool]]) -> None:
    bucket_list: list[Bucket] = [{"tokens": tokens, "audio": tokens if audio else 0} for tokens, audio in sizes]
    bucket_list.append({"tokens": 2000, "audio": 2000})
    few = spanning(bucket_list)
    assert all(any(fits(taken, bucket) for taken in few) for bucket in bucket_list)
    tokens = [bucket["tokens"] for bucket in few]
    assert all(smaller * 16 <= larger for larger, smaller in pairwise(tokens)) and len(few) <= 4


def test_no_chosen_bucket_is_larger_than_a_batch_can_be() -> None:
    assert chosen_buckets((8, 2, 64, 2, 32), 16) == [2, 8, 16]
    assert chosen_buckets((), 16) == []
