from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from models.voxcpm2.model import VoxCPM2
from tests.models.voxcpm2 import golden


@pytest.fixture(scope="module")
def model() -> VoxCPM2:
    return golden.never_stopping()


@pytest.fixture(scope="module")
def exact_products() -> Iterator[None]:
    """The codec without TF32, so that what else could differ shows."""
    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = allowed
