"""Clips on their way to patches: encoded piece by piece between the steps of live streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from models.protocol import SpeechModel
from service.engine.messages import EncodeReference


@dataclass(eq=False)
class _Job:
    request_id: str
    pieces: Iterator[Tensor]
    patches: list[Tensor] = field(default_factory=list)


class ClipQueue:
    """Encodes clips in order of arrival, one piece per launch."""

    def __init__(self, model: SpeechModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._jobs: deque[_Job] = deque()

    def submit(self, request: EncodeReference) -> None:
        pad: Literal["left", "right"] = "left" if request.pad == "left" else "right"
        wave = torch.tensor(request.wave, dtype=torch.float32).to(self._device)
        self._jobs.append(_Job(request.request_id, self._model.encode_reference_pieces(wave, pad)))

    def abort(self, request_id: str) -> None:
        self._jobs = deque(job for job in self._jobs if job.request_id != request_id)

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def next_id(self) -> str:
        """Request of the piece that comes next."""
        return self._jobs[0].request_id

    def launch(self) -> Tensor | None:
        """Launches the next piece; the clip's patches float32 [n, frames, channels] when there is none left."""
        job = self._jobs[0]
        piece = next(job.pieces, None)
        if piece is not None:
            job.patches.append(piece)
            return None
        self._jobs.popleft()
        return torch.cat(job.patches).float()
