"""Upload of pictures to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload_frames(frames: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """uint8 arrays of one shape -> [n, *shape] on `device`, with one copy on the host.

    That copy is in pinned memory. From pageable memory the driver would copy only once everything launched before has
    run, and the launching thread would wait for it.
    """
    shape = (len(frames), *frames[0].shape)
    host = torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    np.stack(frames, out=host.numpy())
    return host.to(device, non_blocking=True)
