"""The codec through the CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.op import Op
from models.voxcpm2 import vae_layers
from models.voxcpm2.model import load_model
from tests.models.voxcpm2.golden import DIRECTORY, expected, model

pytestmark = pytest.mark.gpu


def to_tf32(x: Tensor) -> Tensor:
    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def test_the_codec_is_as_close_as_products_rounded_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the reference's audio: the kernels, and plain products of operands that are rounded to TF32."""
    latents = expected()["zero_shot.patches"].flatten(0, 1).T[None]
    captured = expected()["zero_shot.audio"][0]
    with torch.inference_mode():
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
        codec = load_model(DIRECTORY, torch.device("cuda"), torch.float32).vae.decoder
        ours = codec(latents.to("cuda"))[0, 0].cpu()
        for name in ("conv1d", "conv_transpose1d"):
            product: Callable[..., Tensor] = getattr(F, name)

            def rounded(x: Tensor, weight: Tensor, *rest: Any, product: Any = product, **options: Any) -> Tensor:
                if options.get("groups", 1) > 1:
                    return product(x, weight, *rest, **options)
                return product(to_tf32(x), to_tf32(weight), *rest, **options)

            monkeypatch.setattr(F, name, rounded)
        for operation in vars(vae_layers).values():
            if isinstance(operation, Op):  # What runs on a CPU makes the same products by other functions.
                monkeypatch.setattr(operation, "_cpu", operation.reference)
        ideal = model().vae.decoder(latents)[0, 0]
    assert (ours - captured).norm() <= 1.5 * (ideal - captured).norm()
    assert float(ours @ captured / (captured @ captured)) == pytest.approx(1.0, abs=1e-3)
