"""Messages and their arrays as frames, and frames that are no message."""

from __future__ import annotations

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
    Command,
    EncodeReference,
    EngineState,
    Failed,
    ModelState,
    Outputs,
    ReferenceEncoded,
    SpeechDelta,
    SpeechRequest,
    SpeechSegment,
    TokenInfo,
)
from service.link.sampling import SamplingParams

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
arrays = st.sampled_from(sorted(wire.DTYPES)).flatmap(lambda dtype: hnp.arrays(dtype, shapes))
PIXELS = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
ITEM = MediaItem("image", (PIXELS, PIXELS[:1]), {"grid": np.ones(3, np.int32), "": PIXELS[:0]}, 4, 1, 4, b"\xff" * 32)
IDS = np.arange(5, dtype=np.int32)
PROMPT = Prompt(IDS, np.stack([IDS] * 3), 2**31 - 1, (ITEM, ITEM), (PlaceholderRange(0, 1, 2),))
CLIP = np.full((3, 4, 2), 0.1, np.float32)
SEGMENTS = (SpeechSegment((1, 2), 3, 4), SpeechSegment((), 0, 0))
SAMPLING = SamplingParams(9, temperature=0.1, logit_bias={1: -100.0}, seed=-(2**63), stop_token_ids=(1, 2), logprobs=20)
COMMANDS = [
    ChatRequest("r", "\u00e9", PROMPT, SAMPLING, 0.1),
    ChatRequest("", "m", Prompt(IDS[:0], IDS[None, :0], 0), SamplingParams(max_tokens=1), 1e300),
    SpeechRequest("r", "m", SEGMENTS, 2**63 - 1, 2.0, 10, live=True, arrival=0.1, reference=CLIP, prompt=CLIP[:0]),
    EncodeReference("r", "m", CLIP.ravel(), "right", 0.1),
    Abort("r"),
]
OUTPUTS = [
    Outputs(),
    Outputs(
        chat=(ChatDelta("r", (1, 2), (TokenInfo(-0.5, ((1, -0.5), (2, -3.0))),), "stop", 7), ChatDelta("s", ())),
        speech=(SpeechDelta("r", CLIP.ravel(), 2), SpeechDelta("s", CLIP.ravel()[:0], 0)),
        encoded=(ReferenceEncoded("r", CLIP),),
        failed=(Failed("r", 503, "code", "why"),),
        observations=(Observation("steps_total", 0.1),),
        state=EngineState("ready", "", (ModelState("m", 1, 2, 3, 4, 5),), 7),
    ),
]


def _plain(message: Any) -> Any:
    """What it holds, in values that can be compared."""
    return msgspec.to_builtins(message, enc_hook=lambda array: [array.dtype.str, array.shape, array.tobytes()])


def _sent(frames: list[wire.Frame]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_commands_round_trip(command: Any) -> None:
    assert _plain(wire.MessageDecoder(Command).decode(_sent(wire.encode(command)))) == _plain(command)


@pytest.mark.parametrize("message", OUTPUTS, ids=["nothing", "everything"])
def test_outputs_round_trip(message: Outputs) -> None:
    assert _plain(wire.MessageDecoder(Outputs).decode(_sent(wire.encode(message)))) == _plain(message)


@given(arrays)
@settings(max_examples=60, deadline=None)
def test_arrays_keep_their_bits_and_arrive_read_only(array: np.ndarray) -> None:
    message = Outputs(encoded=(ReferenceEncoded("r", array),))
    received = wire.MessageDecoder(Outputs).decode(_sent(wire.encode(message))).encoded[0].patches
    assert received.tobytes() == array.tobytes()
    assert received.dtype == array.dtype and received.shape == array.shape
    assert not received.flags.writeable


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.arange(12, dtype=np.float32)
    frames = wire.encode(Outputs(speech=(SpeechDelta("r", array, 0),)))
    assert np.shares_memory(np.frombuffer(frames[1], dtype=np.float32), array)
    received = wire.MessageDecoder(Outputs).decode(frames).speech[0].audio
    assert np.shares_memory(received, array)


def test_strided_arrays_arrive_in_order() -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2]
    message = Outputs(encoded=(ReferenceEncoded("r", array),))
    received = wire.MessageDecoder(Outputs).decode(_sent(wire.encode(message))).encoded[0].patches
    np.testing.assert_array_equal(received, array)


@pytest.mark.parametrize("dtype", ["O", "U4", "complex64", ">f4", "datetime64[s]"])
def test_other_dtypes_are_refused_when_sent(dtype: str) -> None:
    with pytest.raises(ValueError, match="dtype"):
        wire.encode(Outputs(encoded=(ReferenceEncoded("r", np.zeros(2, dtype=dtype)),)))


@pytest.mark.parametrize(
    "header", [[0, "float32", [3]], [0, "object", [1]], [1, "float32", [2]], [0, "float32"], "array"]
)
def test_headers_that_lie_are_refused(header: Any) -> None:
    body = {"type": "Outputs", "encoded": [{"type": "ReferenceEncoded", "request_id": "r", "patches": header}]}
    with pytest.raises((msgspec.DecodeError, IndexError)):
        wire.MessageDecoder(Outputs).decode([msgspec.msgpack.encode(body), b"\0" * 8])


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [msgspec.msgpack.encode({"type": "Pickle"})]])
def test_what_is_no_message_is_refused(frames: list[bytes]) -> None:
    with pytest.raises((msgspec.DecodeError, IndexError)):
        wire.MessageDecoder(Command).decode(frames)
