"""What recognisers, aligners and speech models do in the API process; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from models.interfaces.media import MediaItem, Prompt


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
