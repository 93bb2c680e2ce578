"""Reference audio waiting to be encoded to patches, piece by piece between the steps of live streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.protocol import SpeechModel
from service.link.messages import EncodeReference


@dataclass(eq=False)
class _Job:
    request_id: str
    arrival: float
    pieces: Iterator[Tensor]
    patches: list[Tensor] = field(default_factory=list)
    begun: bool = False


class ReferenceQueue:
    """Encodes reference audio in order of arrival, one piece per launch. At most `max_waiting` have not begun."""

    def __init__(self, model: SpeechModel, device: torch.device, max_waiting: int) -> None:
        self._model = model
        self._device = device
        self._max_waiting = max_waiting
        self._jobs: deque[_Job] = deque()

    @property
    def full(self) -> bool:
        return sum(not job.begun for job in self._jobs) >= self._max_waiting

    def submit(self, request: EncodeReference) -> None:
        self._jobs.append(_Job(request.request_id, request.arrival, self._pieces(request)))

    def _pieces(self, request: EncodeReference) -> Iterator[Tensor]:
        """Nothing of it runs before the first launch, which fails alone when the device has no memory for the wave."""
        wave = torch.tensor(request.wave, dtype=torch.float32)
        if self._device.type == "cuda":
            wave = wave.pin_memory()  # torch.tensor pins nothing that comes from NumPy.
        yield from self._model.encode_reference_pieces(wave.to(self._device, non_blocking=True), request.pad)

    def arrived_before(self, limit: float) -> list[str]:
        """Requests that arrived before `limit` and have not begun."""
        return [job.request_id for job in self._jobs if not job.begun and job.arrival < limit]

    def abort(self, request_id: str) -> None:
        self._jobs = deque(job for job in self._jobs if job.request_id != request_id)

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def next_id(self) -> str:
        """The request whose piece comes next."""
        return self._jobs[0].request_id

    def launch(self) -> Tensor | None:
        """Launches the next piece; all patches float32 [n, frames, channels] when there is none left."""
        job = self._jobs[0]
        job.begun = True
        piece = next(job.pieces, None)
        if piece is not None:
            job.patches.append(piece)
            return None
        self._jobs.popleft()
        return torch.cat(job.patches).float()
