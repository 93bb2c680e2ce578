"""Messages and their arrays as frames, and frames that are no message."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from models.interfaces.media import MediaItem, PlaceholderRange, Prompt
from service.graphs.observations import Observation
from service.link import wire
from service.link.messages import (
    Abort,
    ChatDelta,
    ChatRequest,
    EncodeReference,
    EngineState,
    Failed,
    ModelState,
    Outputs,
    ReferenceEncoded,
    SamplingParams,
    SpeechDelta,
    SpeechRequest,
    SpeechSegment,
    TokenInfo,
)

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
arrays = st.sampled_from(sorted(wire.DTYPES)).flatmap(lambda dtype: hnp.arrays(dtype, shapes))
small_ints = st.integers(0, 2**31 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False, width=64)

items = st.builds(
    MediaItem,
    kind=st.sampled_from(["image", "video"]),
    frames=st.lists(hnp.arrays(np.uint8, st.tuples(st.integers(1, 6), st.integers(1, 6), st.just(3))), max_size=3).map(
        tuple
    ),
    arrays=st.dictionaries(st.text(max_size=8), hnp.arrays(np.int32, shapes), max_size=3),
    num_patches=small_ints,
    num_sequences=small_ints,
    num_embeds=small_ints,
    digest=st.binary(min_size=32, max_size=32),
)
prompts = st.builds(
    Prompt,
    token_ids=hnp.arrays(np.int32, st.integers(0, 20)),
    positions=hnp.arrays(np.int32, st.tuples(st.sampled_from([1, 3]), st.integers(0, 20))),
    next_position=small_ints,
    items=st.lists(items, max_size=2).map(tuple),
    placeholders=st.lists(st.builds(PlaceholderRange, small_ints, small_ints, small_ints), max_size=3).map(tuple),
)
sampling = st.builds(
    SamplingParams,
    max_tokens=small_ints,
    temperature=finite,
    logit_bias=st.dictionaries(small_ints, finite, max_size=4),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=st.lists(small_ints, max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
)
clips = st.none() | hnp.arrays(np.float32, st.tuples(st.integers(0, 3), st.just(4), st.just(2)))
segments = st.builds(SpeechSegment, st.lists(small_ints, max_size=4).map(tuple), small_ints, small_ints)
commands = st.one_of(
    st.builds(ChatRequest, st.text(), st.text(), prompts, sampling, finite),
    st.builds(
        SpeechRequest,
        request_id=st.text(),
        model=st.text(),
        segments=st.lists(segments, max_size=2).map(tuple),
        seed=small_ints,
        cfg_value=finite,
        solver_steps=small_ints,
        live=st.booleans(),
        arrival=finite,
        reference=clips,
        prompt=clips,
    ),
    st.builds(
        EncodeReference,
        st.text(),
        st.text(),
        hnp.arrays(np.float32, st.integers(0, 50)),
        st.sampled_from(("left", "right")),
        finite,
    ),
    st.builds(Abort, st.text()),
)
outputs = st.builds(
    Outputs,
    chat=st.lists(
        st.builds(
            ChatDelta,
            st.text(),
            st.lists(small_ints, max_size=4).map(tuple),
            st.lists(st.builds(TokenInfo, finite, st.just(((1, -0.5), (2, -3.0)))), max_size=2).map(tuple),
            st.none() | st.sampled_from(["stop", "length"]),
            small_ints,
        ),
        max_size=3,
    ).map(tuple),
    speech=st.lists(
        st.builds(SpeechDelta, st.text(), hnp.arrays(np.float32, st.integers(0, 50)), small_ints), max_size=2
    ).map(tuple),
    encoded=st.lists(st.builds(ReferenceEncoded, st.text(), arrays), max_size=2).map(tuple),
    failed=st.lists(st.builds(Failed, st.text(), small_ints, st.text(), st.text()), max_size=2).map(tuple),
    observations=st.lists(st.builds(Observation, st.text(), finite), max_size=2).map(tuple),
    state=st.none()
    | st.builds(EngineState, st.text(), st.text(), st.just((ModelState("m", 1, 2, 3, 4, 5, 6),)), small_ints),
)


def _assert_equal(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, msgspec.Struct):
        for name in left.__struct_fields__:
            _assert_equal(getattr(left, name), getattr(right, name))
    elif dataclasses.is_dataclass(left):
        for field in dataclasses.fields(left):
            _assert_equal(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, tuple | list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            _assert_equal(one, other)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            _assert_equal(left[key], right[key])
    else:
        assert left == right


def _sent(frames: list[wire.Frame]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@given(commands)
@settings(max_examples=80, deadline=None)
def test_commands_round_trip(command: Any) -> None:
    _assert_equal(wire.command_decoder().decode(_sent(wire.encode(command))), command)


@given(outputs)
@settings(max_examples=80, deadline=None)
def test_outputs_round_trip(message: Outputs) -> None:
    _assert_equal(wire.outputs_decoder().decode(_sent(wire.encode(message))), message)


@given(arrays)
@settings(max_examples=60, deadline=None)
def test_arrays_keep_their_bits_and_arrive_read_only(array: np.ndarray) -> None:
    message = Outputs(encoded=(ReferenceEncoded("r", array),))
    received = wire.outputs_decoder().decode(_sent(wire.encode(message))).encoded[0].patches
    assert received.tobytes() == array.tobytes()
    assert received.dtype == array.dtype and received.shape == array.shape
    assert not received.flags.writeable


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.arange(12, dtype=np.float32)
    frames = wire.encode(Outputs(speech=(SpeechDelta("r", array, 0),)))
    assert np.shares_memory(np.frombuffer(frames[1], dtype=np.float32), array)
    received = wire.outputs_decoder().decode(frames).speech[0].audio
    assert np.shares_memory(received, array)


def test_strided_arrays_arrive_in_order() -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2]
    message = Outputs(encoded=(ReferenceEncoded("r", array),))
    received = wire.outputs_decoder().decode(_sent(wire.encode(message))).encoded[0].patches
    np.testing.assert_array_equal(received, array)


@pytest.mark.parametrize("dtype", ["O", "U4", "complex64", ">f4", "datetime64[s]"])
def test_other_dtypes_are_refused_when_sent(dtype: str) -> None:
    with pytest.raises(wire.WireError, match="dtype"):
        wire.encode(Outputs(encoded=(ReferenceEncoded("r", np.zeros(2, dtype=dtype)),)))


@pytest.mark.parametrize(
    ("header", "frames"),
    [
        ([0, "float32", [3]], [b"\0" * 8]),
        ([0, "float32", [-1, -2]], [b"\0" * 8]),
        ([0, "object", [1]], [b"\0" * 8]),
        ([1, "float32", [2]], [b"\0" * 8]),
        ([-1, "float32", [2]], [b"\0" * 8]),
        ([0, "float32"], [b"\0" * 8]),
        ("array", [b"\0" * 8]),
    ],
)
def test_headers_that_lie_are_refused(header: Any, frames: list[bytes]) -> None:
    body = msgspec.msgpack.encode(
        {"type": "Outputs", "encoded": [{"type": "ReferenceEncoded", "request_id": "r", "patches": header}]}
    )
    with pytest.raises(wire.WireError):
        wire.outputs_decoder().decode([body, *frames])


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [msgspec.msgpack.encode({"type": "Pickle"})]])
def test_what_is_no_message_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(wire.WireError):
        wire.command_decoder().decode(frames)
