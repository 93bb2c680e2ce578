"""Transcripts of spoken answers stay for their time, within limits of number and bytes."""

from __future__ import annotations

from service.api.engines.transcripts import Transcripts


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_transcripts_expire() -> None:
    clock = Clock()
    kept = Transcripts(lifetime=60, clock=clock)
    assert kept.expiry() == 1060
    kept.add("a", "one")
    clock.now += 30
    kept.add("b", "two")
    clock.now += 30
    assert (kept.find("a"), kept.find("b")) == (None, "two")
    clock.now += 30
    assert kept.find("b") is None and not kept._kept and kept._bytes == 0


def test_the_oldest_transcripts_make_room() -> None:
    kept = Transcripts(most=3, most_bytes=100)
    for name in "abcd":
        kept.add(name, name)
    assert [kept.find(name) for name in "abcd"] == [None, "b", "c", "d"]
    kept.add("long", "\u00e9" * 49)  # 98 bytes: one of the others stays
    assert [kept.find(name) for name in "bcd"] == [None, "c", "d"]
    kept.add("e", "e")
    assert kept.find("c") is None and all(kept.find(name) for name in ("d", "long", "e"))
    kept.add("too long", "x" * 101)
    assert kept.find("too long") is None and kept.find("e") == "e"
