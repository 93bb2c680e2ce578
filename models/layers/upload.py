"""Upload of media to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload_frames(frames: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Arrays of one shape and dtype -> [n, *shape] on `device`, with one copy on the host.

    That copy is in pinned memory. From pageable memory the driver would copy only once everything launched before has
    run, and the launching thread would wait for it.
    """
    shape = (len(frames), *frames[0].shape)
    dtype = torch.from_numpy(np.empty(0, frames[0].dtype)).dtype
    host = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    np.stack(frames, out=host.numpy())
    return host.to(device, non_blocking=True)
