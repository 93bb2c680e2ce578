"""Pictures on their way to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.layers.upload import upload_frames
from tests.support.devices import DEVICES


@pytest.mark.parametrize("device", DEVICES)
def test_frames_arrive_as_they_are_and_are_not_shared(device: str) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)
    frames.flags.writeable = False  # as they come from the wire
    sent = upload_frames(tuple(frames), torch.device(device))
    assert sent.shape == (2, 5, 7, 3) and sent.device.type == device
    np.testing.assert_array_equal(sent.cpu().numpy(), frames)
    sent.zero_()
    assert frames.any()


@pytest.mark.gpu
def test_the_host_does_not_wait_for_what_was_launched_before() -> None:
    device = torch.device("cuda")
    frame = np.ones((1024, 1024, 3), dtype=np.uint8)
    upload_frames((frame,), device)  # the allocators' own first calls may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 28)  # cycles: more than 0.1 s
    launched = torch.cuda.Event()
    launched.record()
    sent = upload_frames((frame,), device)
    assert not launched.query()
    assert sent.all()
