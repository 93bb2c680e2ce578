"""A hand-stepped engine that keeps logits, for tests that compare them with references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.protocol import ChatModel
from service.engine.chat.runner import StepOutput
from service.engine.chat.scheduler_output import Step
from tests.support.inline_engine import InlineEngine


class LogitsEngine(InlineEngine):
    """Keeps the raw logits behind every token of requests that ask for logprobs."""

    def __init__(self, model: ChatModel, processor: Any, **settings: Any) -> None:
        super().__init__(model, processor, **{"num_pages": 128, "max_step_tokens": 512, **settings})
        self.logits: dict[str, list[Tensor]] = {}
        runner = self.worker._runner
        launch, results = runner.launch, runner._results
        self.step: Step | None = None

        def captured_launch(step: Step, embeds: Any) -> StepOutput:
            self.step = step
            return launch(step, embeds)

        def captured_results(outputs: Mapping[str, Tensor], rows: int, logprobs: int | None) -> Any:
            assert self.step is not None
            ends = tuple(chunk.sequence for chunk in self.step.chunks if chunk.is_last)
            sequences = (*self.step.sequences, *ends)
            if rows < len(sequences):  # Two replays: the chunks and then, as the step without chunks, the decode rows.
                sequences, self.step = ends, replace(self.step, chunks=())
            for row, sequence in enumerate(sequences):
                if "logits" in outputs:
                    rows_of = self.logits.setdefault(sequence.request.request_id, [])
                    rows_of.append(outputs["logits"][row].clone())
            return results(outputs, rows, logprobs)

        runner.launch, runner._results = captured_launch, captured_results  # type: ignore[method-assign]

    def rows(self, name: str, count: int) -> Tensor:
        """The first `count` tokens' logits [count, vocabulary] of a request."""
        return torch.stack(self.logits[name][:count])
