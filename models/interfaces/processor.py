"""The host side of a family: text, media and positions. Runs in the API process; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from PIL import Image

from models.interfaces.media import (
    CallFormat,
    ChatMessage,
    MediaItem,
    MediaKind,
    Prompt,
    TokenizedChat,
    Tool,
    VideoFrames,
    VideoMetadata,
)
from models.interfaces.resizing import FrameResizer


@dataclass(frozen=True)
class Transcript:
    """What was said. language: the model's name of it, "Chinese,English" where it changed; None where it heard none."""

    language: str | None
    text: str


class AudioItems(Protocol):
    """What a model hears."""

    sample_rate: int
    """Samples per second of `item`, which are mono and within -1 and 1; of integers, value / 32768."""
    max_seconds: float
    """Longest item."""

    def item(self, samples: np.ndarray) -> MediaItem:
        """float32 [n]. Raises InputError if there are none, too many, or some that are not finite. Samples over 1 scale
        the others down; silence is audio like any other."""
        ...


class AudioInput(AudioItems, Protocol):
    """What a model that transcribes hears, and how its answers are read."""

    languages: Mapping[str, str]
    """The model's names of languages by ISO code."""
    start_id: int
    """Id of the token behind which an answer's text begins, unless the language was given."""

    def language(self, name: str) -> str:
        """The model's name of a language, from a name or a code such as en or en-US. Raises InputError."""
        ...

    def prompt(
        self, item: MediaItem, *, context: str = "", language: str | None = None, continuation: str = ""
    ) -> Prompt:
        """context: untrusted text with names and words that may occur. language: from `language`; None: the model says
        which. continuation: text with which the answer has begun."""
        ...

    def max_new_tokens(self, item: MediaItem) -> int:
        """Length at which an answer is in a loop."""
        ...

    def transcript(self, raw: str, language: str | None = None) -> Transcript:
        """Reads a whole answer, repetitions repaired. raw: the text of all its ids. language: as given to `prompt`."""
        ...

    def pieces(self, samples: np.ndarray, seconds: float) -> list[np.ndarray]:
        """Cuts float32 [n] at quiet places into consecutive pieces of about so many seconds."""
        ...

    def joined(self, transcripts: Sequence[Transcript]) -> Transcript:
        """The transcript of a recording from those of its pieces."""
        ...


@dataclass(frozen=True)
class AlignedWord:
    """start, end: seconds. Both are the same for words shorter than the model's resolution."""

    word: str
    start: float
    end: float


class Aligner(AudioItems, Protocol):
    """The processor of a model that says when words were said."""

    def words(self, text: str, language: str | None = None) -> list[str]:
        """The words of a transcript that get a time, without punctuation. language: as in Transcript. Raises InputError
        for one that the model does not know."""
        ...

    def alignment_prompt(self, item: MediaItem, words: Sequence[str]) -> Prompt:
        """Its marks (Prompt.marks) are the starts and ends of the words."""
        ...

    def aligned(self, words: Sequence[str], classes: np.ndarray) -> list[AlignedWord]:
        """classes: int [2 * words], those of the marks (ChatDelta.classes)."""
        ...


class ChatProcessor(Protocol):
    """Turns messages and media into a Prompt."""

    stop_token_ids: frozenset[int]
    generation_defaults: Mapping[str, float | int]
    """Sampling fields of the checkpoint's generation_config.json (temperature, top_p, ...)."""
    context_length: int
    vocab_size: int
    reasoning_markers: tuple[str, str] | None
    """Strings around reasoning text in answers, e.g. ("<think>", "</think>")."""
    call_format: CallFormat
    """How answers write calls of tools."""

    @property
    def audio(self) -> AudioInput | None:
        """None for models that take no audio."""
        ...

    template_options: frozenset[str]
    """Options of this model's chat template: of enable_thinking, preserve_thinking and reasoning_effort those that it
    reads itself."""
    modes: Mapping[str, ChatProcessor]
    """By downsample_mode, the processor of a request that names it; empty for families without."""

    def tokenize(self, text: str) -> list[int]:
        """Ids of untrusted text: literal special tokens in it are encoded as plain text."""
        ...

    def tokenize_prompt(self, text: str) -> list[int]:
        """Ids of a whole prompt: literal special tokens in it are special."""
        ...

    def detokenize(self, token_ids: Sequence[int]) -> bytes:
        """Bytes of generated ids, special tokens left out; joins over any split of the ids."""
        ...

    def image(self, picture: Image.Image, *, detail: str = "auto", source: bytes | None = None) -> MediaItem:
        """source: models.interfaces.media.source_digest of the file that the picture was decoded from, which spares
        hashing its pixels."""
        ...

    def sample_video(self, metadata: VideoMetadata, *, fps: float | None, max_frames: int) -> list[int]:
        """Indices of the frames to decode, by the family's documented rule, at most max_frames."""
        ...

    def frame_resizer(self, metadata: VideoMetadata, num_frames: int) -> FrameResizer:
        """What resizes `num_frames` sampled frames of a video. Raises InputError for a size that the model cannot
        take."""
        ...

    def video(self, video: VideoFrames) -> MediaItem: ...

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        kinds: Sequence[MediaKind],
        *,
        options: Mapping[str, Any],
        tools: Sequence[Tool] = (),
    ) -> TokenizedChat:
        """Renders the chat template and tokenizes it, which needs no media. kinds: those of the items that the messages
        name. options: enable_thinking, add_vision_id, template_options. tools: written as models/text/tools.py says.

        Raises models.interfaces.errors.InputError that names the field, or the option that would change nothing.
        """
        ...

    def expand_placeholders(self, chat: TokenizedChat, items: Sequence[MediaItem]) -> Prompt:
        """Replaces placeholders by the tokens of their items and gives every token its position. Reads neither text nor
        pixels: 16,384 tokens take less than a millisecond.

        Raises models.interfaces.errors.InputError for a prompt that leaves no room for an answer.
        """
        ...


@dataclass(frozen=True, eq=False)
class SpeechLayout:
    """One time axis of text tokens and audio patches.

    token_ids: int32 [n], 0 at audio positions. audio_mask: bool [n]. Patches of reference and prompt audio, in this
    order, fill the masked positions.
    """

    token_ids: np.ndarray
    audio_mask: np.ndarray


class SpeechProcessor(Protocol):
    """Turns text and the lengths of reference and prompt audio into a SpeechLayout."""

    solver_steps: tuple[int, ...]
    """Numbers of solver steps that requests may choose if the server sets no others; the first is the default."""
    cfg_value: float
    """Strength of classifier-free guidance, unless a request names another one."""
    min_patches: int
    """Patches before a segment may end, unless a request names another number."""
    context_length: int
    """Positions, prompt and generated patches together."""
    sample_rate: int
    """Samples per second of the output."""
    samples_per_patch: int
    reference_sample_rate: int
    """Samples per second of the reference audio that the engine encodes."""

    def tokenize(self, text: str) -> list[int]:
        """Ids of untrusted text. Raises InputError when it holds a literal special token or nothing to speak."""
        ...

    def unspoken(self, text: str) -> str:
        """The letters, digits and signs of the text that the vocabulary lacks, each once: they are not spoken."""
        ...

    def layout(self, text_ids: Sequence[int], *, reference_patches: int = 0, prompt_patches: int = 0) -> SpeechLayout:
        """Layout of zero-shot speech (no patches), of a reference, of a continuation (prompt_patches; text_ids hold
        transcript + text), or of both."""
        ...

    def max_patches(self, text_ids: Sequence[int]) -> int:
        """Cap on the generated patches for a text of these ids."""
        ...
