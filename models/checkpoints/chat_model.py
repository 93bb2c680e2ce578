"""Loading of vision-language models: what is the same in all families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from models.checkpoints.checkpoint import LoadFormat, Quantization, load_parameters, without_memory
from models.interfaces.rule import Rule

E = TypeVar("E", bound=nn.Module)
D = TypeVar("D", bound=nn.Module)


class VisionChatModel(nn.Module, Generic[E, D]):
    """Implements models.protocol.ChatModel."""

    def __init__(self, encoder: E, decoder: D) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder


def load_chat_model(
    build: Callable[[], tuple[E, D]],
    rules: Sequence[Rule],
    directory: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    load_format: LoadFormat,
    quantization: Quantization,
    **options: Any,
) -> VisionChatModel[E, D]:
    """build: makes encoder and decoder, on the meta device. options: of load_parameters."""
    with without_memory():
        model = VisionChatModel(*build())
        if quantization == "fp8":
            cast("Any", model.decoder).hold_in_e4m3()
    load_parameters(
        model, directory, rules, device=torch.device(device), dtype=dtype, load_format=load_format, **options
    )
    return model.eval()
