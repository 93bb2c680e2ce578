"""Placeholder tokens of a conversation, and the tokens that replace them once the sizes of the media are known."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

from models.interfaces.errors import InputError, PromptTooLong
from models.interfaces.media import ChatMessage, PlaceholderRange, TokenizedChat


@dataclass(frozen=True, eq=False)
class MediaTokens:
    """Prompt tokens of one item: int32 [n]. runs: (start, length) of the tokens that take the item's embeddings, in
    order."""

    token_ids: np.ndarray
    runs: tuple[tuple[int, int], ...]


def plain(token_ids: Sequence[int]) -> MediaTokens:
    """Tokens that keep their own embeddings."""
    return MediaTokens(np.array(token_ids, dtype=np.int32), ())


def repeated(token_id: int, count: int) -> MediaTokens:
    """One run of placeholders."""
    return MediaTokens(np.full(count, token_id, dtype=np.int32), ((0, count),))


def join(parts: Sequence[MediaTokens]) -> MediaTokens:
    """The tokens of all parts, one part after the other."""
    runs: list[tuple[int, int]] = []
    length = 0
    for part in parts:
        runs += [(length + start, count) for start, count in part.runs]
        length += len(part.token_ids)
    return MediaTokens(np.concatenate([part.token_ids for part in parts]), tuple(runs))


def tokenized_chat(
    token_ids: Sequence[int], messages: Sequence[ChatMessage], placeholder_ids: Container[int]
) -> TokenizedChat:
    """Assigns the items, in the order in which the messages name them, to the placeholders that the chat template made.
    Raises InputError if their numbers differ."""
    order = [part.item for message in messages for part in message.content if part.item is not None]
    found = [index for index, token in enumerate(token_ids) if token in placeholder_ids]
    if len(found) != len(order):
        shown = f"shows {len(found)} of the {len(order)} pictures and videos of these messages"
        raise InputError("messages", f"the chat template of this model {shown}")
    return TokenizedChat(np.array(token_ids, dtype=np.int32), tuple(zip(found, order, strict=True)))


def expand(chat: TokenizedChat, media: Sequence[MediaTokens]) -> tuple[np.ndarray, tuple[PlaceholderRange, ...]]:
    """Token ids int32 [n], with the k-th placeholder replaced by media[k], and the ranges that take embeddings."""
    if not media:
        return chat.token_ids, ()
    pieces: list[np.ndarray] = []
    placeholders: list[PlaceholderRange] = []
    taken = length = 0
    for (index, item), tokens in zip(chat.placeholders, media, strict=True):
        pieces += (chat.token_ids[taken:index], tokens.token_ids)
        length += index - taken
        placeholders += [PlaceholderRange(item, length + start, count) for start, count in tokens.runs]
        length += len(tokens.token_ids)
        taken = index + 1
    return np.concatenate([*pieces, chat.token_ids[taken:]]), tuple(placeholders)


def check_length(token_ids: np.ndarray, context_length: int) -> None:
    """Raises PromptTooLong for a prompt that leaves no room for an answer."""
    if len(token_ids) >= context_length:
        raise PromptTooLong(
            "messages",
            f"the prompt is too long: this model's maximum context length is {context_length} tokens, of which the "
            f"prompt takes {len(token_ids)} and the answer needs at least one",
        )
