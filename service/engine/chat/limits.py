"""Which chat requests the engine accepts, and how long their answers may become."""

from __future__ import annotations

from dataclasses import dataclass

from service.link.messages import ChatRequest, Failed
from service.link.sampling_limits import sampling_problem


@dataclass(frozen=True)
class ChatLimits:
    """The limits of one model."""

    max_context: int
    """Positions of one sequence."""
    cache_positions: int
    """Positions that all pages hold."""
    vocab_limit: int
    """Ids that can be sampled."""
    max_waiting: int
    """Requests in the queue."""

    def length_cap(self, request: ChatRequest) -> int:
        """Maximum number of tokens to generate: as requested, but not beyond the context or the pages of the cache."""
        prompt = len(request.prompt.token_ids)
        return min(request.sampling.max_tokens, self.max_context - prompt, self.cache_positions - prompt + 1)

    def refusal(self, request: ChatRequest, num_waiting: int, retry_after: float) -> Failed | None:
        """Why the request is refused; None if it is accepted. retry_after: seconds after which a place in the queue is
        expected to be free."""
        name, length = request.request_id, len(request.prompt.token_ids)
        if num_waiting >= self.max_waiting:
            return Failed(name, 503, "overloaded", "too many requests are waiting", retry_after=retry_after)
        if not length:
            return Failed(name, 400, "invalid_prompt", "the prompt is empty", "messages")
        if (problem := sampling_problem(request.sampling, self.vocab_limit)) is not None:
            return Failed(name, 400, "invalid_value", problem[1], problem[0])
        if request.grammar and request.sampling.min_tokens:
            message = "cannot be combined with tools or a format, whose grammar says where the answer ends"
            return Failed(name, 400, "invalid_value", message, "min_tokens")
        if self.length_cap(request) < 1:
            longest = min(self.max_context - 1, self.cache_positions)
            message = f"the prompt is too long: {length} positions, at most {longest} allowed"
            return Failed(name, 400, "context_length_exceeded", message, "messages")
        return None
