"""Values that describe a prompt: messages, media items and token positions. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from models.interfaces.resizing import FrameResizer

MediaKind = Literal["image", "video", "audio"]
CallFormat = Literal["json", "xml"]
"""How a call is written between its tags (models/text/tools.py)."""

DIGEST_BYTES = 32


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One image, video or audio, ready for an encoder.

    frames: uint8 pictures [height, width, 3], in the order in which the encoder reads them. What each one is (the
        image, a slice of it, a video frame) depends on the family. They are resized, unless the encoder does that.
        Audio has none.
    arrays: further host data that the family's encoder plans with: int32 (grids, temporal ids, group sizes), or float32
        samples of audio.
    num_patches: encoder rows that the item occupies.
    num_sequences: attention sequences (segments of cu_seqlens) that it occupies.
    num_embeds: rows that the encoder returns for it; with DeepStack, a row is the embedding and its features.
    digest: 32 bytes, a cryptographic hash over the decoded pixels, or over the encoded picture that they come from, and
        over all else that changes the item's embeddings (grids, sampling, fusion, processor settings, revision). It is
        the key of the encoder cache and, with tokens and positions, part of the keys of the prefix cache. So what
        changes only positions may be left out.
    """

    kind: MediaKind
    frames: tuple[np.ndarray, ...]
    arrays: Mapping[str, np.ndarray]
    num_patches: int
    num_sequences: int
    num_embeds: int
    digest: bytes


def media_digest(
    kind: MediaKind,
    frames: Sequence[np.ndarray],
    arrays: Mapping[str, np.ndarray],
    settings: bytes,
    source: bytes | None = None,
) -> bytes:
    """BLAKE2b over the content of a media item. Every part is hashed with its shape, so that different contents never
    give the same bytes to hash.

    settings: the processor's identity (configuration and revision), which is hashed, too.
    source: a cryptographic hash of what the frames were made from, such as an encoded picture, which is much shorter
        than its pixels. It is hashed in place of the pixels, so together with settings, arrays and the shapes of the
        frames it must determine them.
    """
    digest = hashlib.blake2b(repr((kind, settings, source)).encode(), digest_size=DIGEST_BYTES)
    for name, array in [*((f"frame {i}", frame) for i, frame in enumerate(frames)), *sorted(arrays.items())]:
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        if source is None or name in arrays:
            digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def source_digest(data: bytes) -> bytes:
    """The `source` of a picture that is decoded from `data`. BLAKE2b: SHA-256 takes twice as long on processors without
    instructions for it."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class PlaceholderRange:
    """`length` consecutive prompt positions from `start` whose embeddings come from rows of item `item`.

    The ranges of one item, in prompt order, take its rows in order.
    """

    item: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class TokenizedChat:
    """A conversation before its media are known: one placeholder token stands for each use of an item.

    token_ids: int32 [n]. placeholders: (index into token_ids, item) in prompt order.
    """

    token_ids: np.ndarray
    placeholders: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class Prompt:
    """A tokenized chat prompt with its media.

    token_ids: int32 [n], placeholders expanded.
    positions: int32 [axes, n]; axes is 3 for M-RoPE and 1 otherwise.
    next_position: position (all axes) of the first generated token; each later token adds one.
    cache_salt: first part of the keys of the prefix cache; prompts with different salts share no cached page.
    marks: ascending int32 [k], the positions for which the most likely class is reported; None: for none.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    next_position: int
    items: tuple[MediaItem, ...] = ()
    placeholders: tuple[PlaceholderRange, ...] = ()
    cache_salt: bytes = b""
    marks: np.ndarray | None = None

    def salted(self, salt: str) -> Prompt:
        """Return the prompt with cache keys that only prompts with the same salt have, those of its media included."""
        key = hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()
        items = tuple(replace(item, digest=source_digest(key + item.digest)) for item in self.items)
        return replace(self, items=items, cache_salt=key)


@dataclass(frozen=True)
class VideoMetadata:
    """What a container says about a video before any frame is decoded; `duration` is in seconds. listed: the request
    has a list of frames, which its sender has chosen; as many of them are used as the limits allow.
    """

    num_frames: int
    fps: float
    duration: float
    height: int
    width: int
    listed: bool = False


@dataclass(frozen=True, eq=False)
class VideoFrames:
    """Decoded frames (uint8 [height, width, 3]) with their indices and times (seconds) in the source.

    requested_fps: the rate that the request asked for (as given to sample_video); None: it named none.
    resizer: what has resized the frames; None: they have the size of the source.
    """

    frames: tuple[np.ndarray, ...]
    indices: tuple[int, ...]
    times: tuple[float, ...]
    metadata: VideoMetadata
    requested_fps: float | None = None
    resizer: FrameResizer | None = None

    def resized(
        self, choose: Callable[[VideoMetadata, int], FrameResizer]
    ) -> tuple[tuple[np.ndarray, ...], FrameResizer]:
        """The resized frames, and what resizes them: by `choose` (ChatProcessor.frame_resizer) if nothing has yet."""
        if self.resizer is not None:
            return self.frames, self.resizer
        height, width = self.frames[0].shape[:2]
        resizer = choose(replace(self.metadata, height=height, width=width), len(self.frames))
        return tuple(map(resizer, self.frames)), resizer


@dataclass(frozen=True)
class ContentPart:
    """One piece of a message: text, or the item with that index in the request's list of media."""

    text: str | None = None
    item: int | None = None


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: JSON Schema of its arguments, an object."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A call that an earlier answer made. arguments: the parsed JSON object, or text that is none."""

    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True)
class ChatMessage:
    """A message of the conversation."""

    role: str
    """system, user, assistant or tool; developer is an alias of system."""
    content: tuple[ContentPart, ...] = field(default_factory=tuple)
    tool_calls: tuple[ToolCall, ...] = ()
    """Only of an assistant. The messages of role tool that follow are the results, in the same order."""
    reasoning: str | None = None
    """Only of an assistant: the reasoning of an earlier answer, if it is not part of the content. None: the content may
    have it, between the family's markers."""
