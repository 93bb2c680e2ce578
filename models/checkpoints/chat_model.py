"""Loading of vision-language models: what is the same in all families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import torch
from torch import nn

from models.checkpoints.checkpoint import LoadFormat, Quantization, Source, load_parameters, without_memory
from models.interfaces.rule import Rule

E = TypeVar("E", bound=nn.Module)
D = TypeVar("D", bound=nn.Module)
M = TypeVar("M", bound=nn.Module)
Options = ParamSpec("Options")


def loader(load: Callable[Concatenate[Source, Options], M]) -> Callable[..., M]:
    """A family's load_model (models.checkpoints.registry.Family.model), which takes the fields of a Source."""

    @wraps(load)
    def load_model(
        directory: Path,
        device: torch.device | str,
        dtype: torch.dtype,
        load_format: LoadFormat = "published",
        quantization: Quantization = "none",
        *args: Options.args,
        **options: Options.kwargs,
    ) -> M:
        return load(Source(directory, torch.device(device), dtype, load_format, quantization), *args, **options)

    return load_model


class VisionChatModel(nn.Module, Generic[E, D]):
    """Implements models.protocol.ChatModel."""

    def __init__(self, encoder: E, decoder: D) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder


def load_chat_model(
    source: Source, build: Callable[[], tuple[E, D]], rules: Sequence[Rule], **options: Any
) -> VisionChatModel[E, D]:
    """build: makes encoder and decoder, on the meta device. options: of load_parameters."""
    with without_memory():
        model = VisionChatModel(*build())
        if source.quantization == "fp8":
            cast("Any", model.decoder).hold_in_e4m3()
    directory, device, dtype, load_format, _ = source
    load_parameters(model, directory, rules, device=device, dtype=dtype, load_format=load_format, **options)
    return model.eval()
