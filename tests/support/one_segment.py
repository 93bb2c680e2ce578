"""Dense attention of single pictures without a GPU, and at the sizes of tests."""

from __future__ import annotations

import pytest
from torch import Tensor

from models.layers import dense_segments

_attend = dense_segments.attend_lengthened


def allow_one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the shapes allow it. PyTorch's attention on a CPU stands for cuDNN's."""
    monkeypatch.setattr(dense_segments, "MIN_ROWS", 1)
    monkeypatch.setattr(dense_segments, "pays", lambda *_: True)
    monkeypatch.setattr(dense_segments, "_refused", set())


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """allow_one_segment; gets the rows of each call of the dense attention."""
    allow_one_segment(monkeypatch)
    calls: list[int] = []

    def counted(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor:
        calls.append(len(qkv))
        return _attend(qkv, cos, sin, cu_seqlens)

    monkeypatch.setattr(dense_segments, "attend_lengthened", counted)
    return calls


@pytest.fixture
def dense_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the attention of equal segments."""
    calls: list[int] = []
    attend = dense_segments.attend_equal_segments

    def counted(qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, length: int) -> Tensor:
        calls.append(len(qkv))
        return attend(qkv, rotary, length)

    monkeypatch.setattr(dense_segments, "attend_equal_segments", counted)
    return calls
