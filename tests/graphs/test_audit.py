"""The audit passes what can be captured and fails every forward that cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, BufferSpec
from tests.support.audit import AuditError, audit
from tests.support.tiny_chat import tiny_model

PARAMETER = torch.ones(4)


class Forward:
    def __init__(self, body: Callable[[Tensor], object]) -> None:
        self.body = body

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        return {"x": BufferSpec((bucket["rows"], 4), torch.float32)}

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        self.body(buffers["x"])
        return {"y": buffers["x"] * 2}


def assigned(x: Tensor, index: object, value: object) -> Tensor:
    y = x.clone()
    y[index] = value  # type: ignore[index]
    return y


BAD: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "item of a parameter": lambda x: PARAMETER.sum().item(),
    "tolist": lambda x: x.tolist(),
    "tolist of a parameter": lambda x: PARAMETER.tolist(),
    "numpy": lambda x: x.numpy(),
    "numpy of a parameter": lambda x: PARAMETER.numpy(),
    "array of a parameter": lambda x: np.asarray(PARAMETER),
    "float": lambda x: float(x.sum()),
    "int as a length": lambda x: x[: x.sum().long()],
    "branch": lambda x: 1 if x.sum() > 0 else 2,
    "branch on a parameter": lambda x: 1 if PARAMETER.sum() > 0 else 2,
    "to the host": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "where without values": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask": lambda x: x[x > 0],
    "mask of a number": lambda x: assigned(x, x > 0, 0.0),
    "mask of a tensor": lambda x: assigned(x, x > 0, x[0, 0]),
    "repeats from data": lambda x: x.repeat_interleave(torch.arange(x.shape[0]), dim=0),
    "equal": lambda x: torch.equal(x, x),
    "tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "scalar tensor": lambda x: x + torch.tensor(1.0),
    "as_tensor": lambda x: x + torch.as_tensor([1.0, 2.0, 3.0, 4.0]),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "from_numpy": lambda x: x + torch.from_numpy(np.ones(4, np.float32)),
    "frombuffer": lambda x: x + torch.frombuffer(bytearray(16), dtype=torch.float32),
    "index list": lambda x: x[[0, 1]],
}

GOOD: dict[str, Callable[[Tensor], object]] = {
    "products": lambda x: x @ torch.eye(4) + PARAMETER,
    "where": lambda x: torch.where(x > 0, x, -torch.inf),
    "index tensor": lambda x: assigned(x, torch.arange(2), 0.0),
    "slice": lambda x: assigned(x, slice(0, 1), 0.0),
    "searchsorted": lambda x: torch.searchsorted(x[0], x[1]),
    "shapes": lambda x: torch.zeros(x.shape[0] + len(x)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_forward_that_cannot_be_captured_fails(name: str) -> None:
    with pytest.raises(AuditError):
        audit(Forward(BAD[name]), {"rows": 3})


@pytest.mark.parametrize("name", GOOD)
def test_a_capturable_forward_passes_with_its_output_shapes(name: str) -> None:
    assert audit(Forward(GOOD[name]), {"rows": 3}) == {"y": BufferSpec((3, 4), torch.float32)}


def test_an_encoder_passes_at_every_bucket() -> None:
    encoder = tiny_model().encoder
    for bucket in encoder.default_buckets():
        assert audit(encoder, bucket)["embeds"].shape == (bucket["patches"] // 2, 32)
