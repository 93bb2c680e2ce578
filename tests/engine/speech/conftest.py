from __future__ import annotations

import pytest

from models.voxcpm2.model import VoxCPM2
from tests.models.voxcpm2 import golden


@pytest.fixture(scope="module")
def model() -> VoxCPM2:
    return golden.never_stopping()
