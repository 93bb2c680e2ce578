"""Text to token ids and prompt layouts of VoxCPM2. No torch in here."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from models.checkpoints.published import read_json
from models.interfaces.errors import CheckpointError, InputError
from models.interfaces.processor import SpeechLayout
from models.text.tokenizer import fast_tokenizer
from models.voxcpm2.config import SOLVER_STEPS, VoxCPM2Config, load_config

# By number, since the published files spell the names of 103 and 104 in two ways.
AUDIO_START = 101
REFERENCE_START = 103
REFERENCE_END = 104

_SPACE = "▁"
_PATCHES_PER_TOKEN = 6.0
_SPARE_PATCHES = 10


class VoxCPM2Processor:
    """The models.interfaces.processor.SpeechProcessor of VoxCPM2."""

    solver_steps = SOLVER_STEPS
    cfg_value = 2.0
    min_patches = 2

    def __init__(self, tokenizer: Tokenizer, config: VoxCPM2Config) -> None:
        self.tokenizer = tokenizer
        self.context_length = config.max_length
        self.sample_rate = config.vae.out_sample_rate
        self.reference_sample_rate = config.vae.sample_rate
        self.samples_per_patch = config.patch_size * prod(config.vae.decoder_rates)
        self._ids = tokenizer.get_vocab(with_added_tokens=True)
        self._unknown = self._ids["<unk>"]
        self._added = {token.content: id_ for id_, token in tokenizer.get_added_tokens_decoder().items()}
        self._characters = self._characters_of_han_words()
        """Ids of the characters of each token that is a word of Han characters, by the token's id."""
        self._lacking = frozenset(self._unspoken("".join(map(chr, range(128)))))

    def tokenize(self, text: str) -> list[int]:
        """Ids of untrusted text: no BOS, words of Han characters split into characters after BPE.

        Raises InputError when the text holds a literal special token or nothing to speak.
        """
        if not text.strip():
            raise InputError("input", "the text holds nothing to speak")
        for literal in self._added:
            if literal in text:
                raise InputError("input", f"the text holds the special token {literal}, which cannot be spoken")
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        if not ids:
            raise InputError("input", "the text holds no character that this model can speak")
        if self._characters.keys().isdisjoint(ids):
            return ids
        return [part for id_ in ids for part in self._characters.get(id_, (id_,))]

    def unspoken(self, text: str) -> str:
        """The letters, digits and signs without a token, each once. Every vocabulary has ASCII's letters and digits."""
        return "" if text.isascii() and self._lacking.isdisjoint(text) else self._unspoken(text)

    def _unspoken(self, text: str) -> str:
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        spans = [span for span, id_ in zip(encoding.offsets, encoding.ids, strict=True) if id_ != self._unknown]
        spoken = {place for begin, end in spans for place in range(begin, end)}
        return "".join(dict.fromkeys(c for place, c in enumerate(text) if place not in spoken and _is_said(c)))

    def layout(self, text_ids: Sequence[int], *, reference_patches: int = 0, prompt_patches: int = 0) -> SpeechLayout:
        """[103 reference 104] text 101 [prompt]; raises InputError when no position is left to speak in."""
        reference: list[int] = []
        if reference_patches:
            reference = [REFERENCE_START, *[0] * reference_patches, REFERENCE_END]
        ids = [*reference, *text_ids, AUDIO_START, *[0] * prompt_patches]
        if len(ids) >= self.context_length:
            raise InputError(
                "input",
                f"text and audio take {len(ids)} positions, the model has {self.context_length} with the speech",
            )
        mask = np.zeros(len(ids), dtype=np.bool_)
        mask[1 : 1 + reference_patches] = bool(reference_patches)
        mask[len(ids) - prompt_patches :] = True
        return SpeechLayout(np.array(ids, dtype=np.int32), mask)

    def max_patches(self, text_ids: Sequence[int]) -> int:
        """Speech of more than six patches (0.96 s) per token has failed to stop (the published length cap)."""
        return int(len(text_ids) * _PATCHES_PER_TOKEN + _SPARE_PATCHES)

    def _characters_of_han_words(self) -> dict[int, tuple[int, ...]]:
        words = {token for token in self._ids if len(token) > 1 and _all_han(token)}
        return {
            id_: tuple(self._ids.get(character, self._unknown) for character in bare)
            for token, id_ in self._ids.items()
            if (bare := token.replace(_SPACE, "")) in words
        }


def load_processor(directory: Path) -> VoxCPM2Processor:
    """Reads config.json and tokenizer.json. Of the latter only truncation and padding are not used; class-specific
    loaders also change its normaliser. Raises CheckpointError that names the file and what is wrong with it."""
    config = load_config(directory)
    tokenizer = fast_tokenizer(read_json(directory, "tokenizer.json"))
    # What programs that train leave in the file; transformers does not apply it either.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Added tokens need no embedding: a text that holds one is refused.
    if max(tokenizer.get_vocab(with_added_tokens=False).values()) >= config.lm.vocab_size:
        raise CheckpointError(f"tokenizer.json has ids over lm_config.vocab_size {config.lm.vocab_size}")
    if tokenizer.token_to_id("<unk>") is None:
        raise CheckpointError("tokenizer.json has no <unk> token")
    return VoxCPM2Processor(tokenizer, config)


def _is_said(character: str) -> bool:
    """Whether a reader says it: a letter, a digit, or a sign of mathematics, of a currency and the like."""
    return character.isalnum() or character in "#*" or unicodedata.category(character).startswith("S")


def _all_han(text: str) -> bool:
    return all("一" <= character <= "鿿" for character in text)
