"""Frames in shared memory: what is placed is read, and a region is free when its last reader has gone."""

from __future__ import annotations

import fcntl
import os

import numpy as np
import pytest
import torch

from service.link import arena
from service.link.arena import GROWTH, IDLE, KEPT, Arena, Loan, MappedArena
from service.link.wire import Frame, WireError

pytestmark = pytest.mark.skipif(not arena.is_supported(), reason="memory is shared on Linux alone")

SIZE = 1 << 20


def made(size: int) -> Arena:
    """With its first memory."""
    own = Arena(size)
    own.wait_grown()
    return own


def frame(value: int, size: int = 100_000) -> Frame:
    return np.full(size, value, np.uint8).data


def borrowed(engine: MappedArena, loan: Loan, count: int = 1) -> list[np.ndarray]:
    frames: list[Frame] = [b""] * count
    engine.borrow(loan, frames)
    return [np.frombuffer(each, np.uint8) for each in frames]


def placed(own: Arena, *frames: Frame) -> Loan:
    found = own.place(list(enumerate(frames)))
    assert found is not None
    return found[0]


def test_frames_are_read_where_they_were_placed_and_nobody_writes_to_them() -> None:
    own = made(SIZE)
    assert not own.is_mapped
    engine = MappedArena(own.file)
    assert own.is_mapped
    one, other = (borrowed(engine, placed(own, frame(n), frame(n + 1, 77)), 2) for n in (1, 5))
    assert [set(each.tolist()) for each in (*one, *other)] == [{1}, {2}, {5}, {6}]
    assert [len(each) for each in one] == [100_000, 77]
    assert not any(each.flags.writeable for each in one)
    assert own.in_use == 2


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_region_is_free_when_no_array_lies_in_it_any_more() -> None:
    own = made(SIZE)
    engine = MappedArena(own.file)
    loan = placed(own, frame(7), frame(8))
    first, second = borrowed(engine, loan, 2)
    part = torch.from_numpy(second.reshape(100, 1000)[3:]).view(97, 10, 100)
    del first, second
    assert own.in_use == 1 and int(part.max()) == 8
    again = placed(own, frame(9))
    assert again.offset != loan.offset
    del part
    assert own.in_use == 1, "the other one"
    assert placed(own, frame(10)).offset == loan.offset, "its place is used again"


def test_what_finds_no_room_is_refused_until_something_is_given_back() -> None:
    own = made(SIZE)
    engine = MappedArena(own.file)
    held = [borrowed(engine, placed(own, frame(n, 200_000))) for n in range(5)]
    assert own.place([(0, frame(5, 200_000))]) is None
    del held[2]
    held.append(borrowed(engine, placed(own, frame(5, 200_000))))
    assert [int(arrays[0].max()) for arrays in held] == [0, 1, 3, 4, 5]
    assert own.place([(0, frame(6, 200_000))]) is None


def test_regions_are_counted_too() -> None:
    own = made(SIZE)
    taken = 0
    while own.place([(0, frame(1, 1))]) is not None:
        taken += 1
    assert taken == own.in_use == 511


def test_a_region_whose_message_was_not_sent_is_taken_back() -> None:
    own = made(SIZE)
    found = own.place([(0, frame(1))])
    assert found is not None
    own.take_back(found[1])
    assert own.in_use == 0
    with pytest.raises(WireError, match="generation"):
        borrowed(MappedArena(own.file), found[0])


def test_a_loan_of_an_earlier_generation_is_an_error_and_touches_nothing() -> None:
    own = made(SIZE)
    engine = MappedArena(own.file)
    old = placed(own, frame(1))
    borrowed(engine, old)  # and given back
    new = placed(own, frame(2))
    assert (new.slot, new.offset) == (old.slot, old.offset)
    with pytest.raises(WireError, match=f"region {old.slot} of shared memory is not of generation {old.generation}"):
        borrowed(engine, old)
    assert own.in_use == 1 and set(borrowed(engine, new)[0].tolist()) == {2}


@pytest.mark.parametrize(
    "wrong",
    [
        {"slot": 0},
        {"slot": 512},
        {"slot": -1},
        {"generation": 0},
        {"offset": 0},
        {"offset": -4096},
        {"offset": 4097},
        {"offset": SIZE - 64},
        {"offset": 1 << 62},
        {"parts": ()},
        {"parts": ((0, 0),)},
        {"parts": ((0, -5),)},
        {"parts": ((1, 100),)},
        {"parts": ((-1, 100),)},
        {"parts": ((0, 100), (0, 100))},
        {"parts": ((0, SIZE),)},
    ],
    ids=str,
)
def test_a_loan_that_cannot_be_is_an_error(wrong: dict[str, object]) -> None:
    own = made(SIZE)
    loan = placed(own, frame(1))
    values = {name: getattr(loan, name) for name in loan.__struct_fields__}
    engine = MappedArena(own.file)
    with pytest.raises(WireError, match="shared memory"):
        borrowed(engine, Loan(**(values | wrong)))
    assert own.in_use == (not wrong.keys() <= {"offset", "parts"}), "a region that is known is given back"


def test_a_file_that_could_become_shorter_is_not_mapped() -> None:
    file = os.memfd_create("frames", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, SIZE)
    with pytest.raises(WireError, match="shorter"):
        MappedArena(file)
    os.close(file)
    own = made(SIZE)
    assert fcntl.fcntl(own.file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(PermissionError):
        os.ftruncate(own.file, 4096)


def test_it_grows_beside_what_it_is_asked_for() -> None:
    own = made(8 * GROWTH)
    engine = MappedArena(own.file)
    held = [borrowed(engine, placed(own, frame(1, GROWTH // 2)))]
    for value in (2, 3):
        assert own.place([(0, frame(value, GROWTH))]) is None
        own.wait_grown()
        held.append(borrowed(engine, placed(own, frame(value, GROWTH))))
    assert [set(arrays[0].tolist()) for arrays in held] == [{1}, {2}, {3}]
    assert taken(own) == 4 * GROWTH, "twice as much each time"


def taken(own: Arena) -> int:
    """Bytes of memory."""
    return 512 * os.fstat(own.file).st_blocks


def test_memory_that_was_needed_once_is_given_back_when_nothing_is_in_use() -> None:
    own = made(3 * KEPT)
    engine = MappedArena(own.file)
    assert own.place([(0, frame(1, 2 * KEPT))]) is None
    own.wait_grown()
    held = borrowed(engine, placed(own, frame(1, 2 * KEPT)))
    most = taken(own)
    for _ in range(IDLE):
        own.trim()
    assert taken(own) == most >= 2 * KEPT and held[0].min() == 1
    del held
    for _ in range(IDLE - 1):
        own.trim()
    assert taken(own) == most
    own.trim()
    assert taken(own) == KEPT
    assert own.place([(0, frame(3, 2 * KEPT))]) is None
    own.wait_grown()
    assert set(borrowed(engine, placed(own, frame(3, 2 * KEPT)))[0].tolist()) == {3}


def test_without_more_memory_it_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = made(4 * GROWTH)
    asked = []

    def refuse(*arguments: int) -> None:
        asked.append(arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    for _ in range(3):
        assert own.place([(0, frame(1, GROWTH))]) is None
        own.wait_grown()
    assert len(asked) == 1 and "No space left" in caplog.text
    assert own.in_use == 0
    placed(own, frame(1, GROWTH // 2))


def test_a_mapping_goes_with_its_last_array() -> None:
    before = descriptors()
    own = made(SIZE)
    engine = MappedArena(own.file)
    arrays = borrowed(engine, placed(own, frame(4)))
    del own, engine
    assert arrays[0].min() == 4, "the API process has ended"
    del arrays
    assert descriptors() == before


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
