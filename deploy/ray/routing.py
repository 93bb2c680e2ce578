"""Which replica a request goes to: one that has seen its picture before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Sequence

import msgspec
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from service.api.chat.schema import Message

DIGEST_BYTES = 16


class _Conversation(msgspec.Struct, frozen=True):
    messages: list[Message]


def media_key(body: bytes) -> str | None:
    """Hash of the first picture or video of a chat request; None where there is none, or the body is no such request.

    The first one stays when a conversation goes on, so that its turns meet their prefix in the cache, too. A remote
    URL is hashed as it is written.
    """
    try:
        messages = msgspec.json.decode(body, type=_Conversation).messages
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            media = part.image_url or part.video_url
            if media:
                url = media if isinstance(media, str) else media.url
                return hashlib.blake2b(url.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()
    return None


def ranked(key: str, names: Sequence[str]) -> list[str]:
    """Names by rendezvous hashing, the best first: when one comes or goes, only its own keys move."""

    def weight(name: str) -> bytes:
        return hashlib.blake2b(f"{key} {name}".encode(), digest_size=DIGEST_BYTES).digest()

    return sorted(names, key=weight, reverse=True)


class MediaRouter(RequestRouter):
    """Media requests: the first non-full replica in the key's ranking; others: power of two choices.

    The arguments of a choice are the key, or None, and the ids of replicas that have failed this request: they come
    last.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        key, failed = None, ()
        if pending_request is not None:
            # All replicas are among what is offered below: if none has room, wait before asking again.
            pending_request.routing_context.should_backoff = True
            if pending_request.args:
                key, failed = pending_request.args
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[replicas[name] for name in group] for group in order(key, list(replicas), failed)]


def order(key: str | None, names: Sequence[str], failed: Collection[str] = ()) -> list[list[str]]:
    """Groups of replicas to ask one after the other; of a group, the less loaded one is asked. failed: come last."""
    left = [name for name in names if name not in failed]
    if key is None:
        shuffled = random.sample(left, len(left))
        groups = [shuffled[:2], shuffled[2:]]
    else:
        groups = [[name] for name in ranked(key, left)]
    return [group for group in (*groups, [name for name in names if name in failed]) if group]
