"""What two readings of a server's metrics tell of its steps."""

from __future__ import annotations

import pytest

from benchmarks.servers.step_metrics import Steps, busy_shares, longest, reached


def test_the_share_of_the_time_in_which_steps_ran() -> None:
    before = {"encoder": 1.0, "prefill": 2.0, "decode": 10.0}
    after = {"encoder": 2.0, "prefill": 2.5, "cached_prefill": 0.5, "mixed": 1.0, "decode": 16.0, "speech": 9.0}
    shares = busy_shares(Steps(seconds=before), Steps(seconds=after), 10.0)
    expected = {"gpu_busy_share": 0.9, "encoder_share": 0.1, "prefill_share": 0.2, "decode_share": 0.6}
    assert shares == {name: pytest.approx(share) for name, share in expected.items()}
    assert busy_shares(Steps(), Steps(), 10.0) == {"gpu_busy_share": None}  # a server of others


def test_the_share_of_what_the_steps_allow() -> None:
    """8 streams, 4 rounds of them: encoder and prefill of 3 and 4 ms each, decode steps of 2 ms."""
    before = Steps(seconds={"decode": 1.0}, timed={"decode": 100.0}, counts={"decode replay captured": 100.0})
    after = Steps(
        seconds={"encoder": 32 * 0.003, "prefill": 16 * 0.004, "mixed": 16 * 0.004, "decode": 1.0 + 600 * 0.002},
        timed={"encoder": 32.0, "prefill": 16.0, "mixed": 16.0, "decode": 700.0},
        counts={"decode replay captured": 700.0, "encoder replay captured": 32.0},
        rows={"decode": 600 * 6.5, "prefill": 9.0},
    )
    row = reached(before, after, 8, 32, 128.0, 2000.0)
    assert (row["encoder_ms"], row["prefill_ms"]) == (pytest.approx(3), pytest.approx(4))
    assert (row["decode_ms"], row["decode_rows"]) == (pytest.approx(2), pytest.approx(6.5))
    assert row["steps_allow_tokens_per_s"] == pytest.approx(8 * 128 / (8 * 0.007 + 127 * 0.002))
    assert row["steps_allow_share"] == pytest.approx(2000 / row["steps_allow_tokens_per_s"])
    assert reached(Steps(), Steps(), 8, 32, 128.0, 2000.0) == {"steps_allow_share": None}  # a server of others


def test_the_longest_step_is_told_by_its_bucket() -> None:
    before = {"decode replay 0.002": 5.0, "decode replay 0.01": 6.0, "decode replay +Inf": 6.0}
    after = {"decode replay 0.002": 9.0, "decode replay 0.01": 10.0, "decode replay +Inf": 10.0}
    after |= {"mixed eager 0.01": 0.0, "mixed eager 30.0": 1.0, "mixed eager +Inf": 2.0, "vae replay +Inf": 0.0}
    assert longest(Steps(buckets=before), Steps(buckets=after)) == {
        "longest_step_at_most_ms": {"decode replay": pytest.approx(2.0), "mixed eager": None}
    }
    assert longest(Steps(), Steps()) == {"longest_step_at_most_ms": {}}
