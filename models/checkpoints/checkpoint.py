"""Strict loading of safetensors checkpoints: every tensor of the files and every parameter of the module is accounted
for, and a missing, unexpected, misshapen or repeated tensor is an error that names it.

A module is built inside `without_memory()`, on the meta device, and gets its memory here, on its device and in its
dtype. So host memory never holds more than one tensor.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.checkpoints import block_scaled, weight_files
from models.checkpoints.weight_files import PublishedTensor, listed, shard_paths
from models.interfaces.errors import CheckpointError
from models.interfaces.rule import Rule
from models.layers.e4m3 import E4M3, E4M3Weight, fill_rows, keep_copies

log = logging.getLogger(__name__)

LoadFormat = Literal["published", "random"]
Quantization = Literal["none", "fp8"]
"""fp8: linear layers of the language model in e4m3, with a scale for each output feature (models.layers.e4m3)."""

_FLOATING = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, eq=False)
class _Place:
    """A part of a parameter that a published tensor fills."""

    view: Tensor
    shape: tuple[int, ...]
    """The published shape; with `transposed`, before its last two axes are exchanged."""
    transposed: bool = False
    scale: Tensor | None = None
    """For a view in e4m3, the scales of its rows."""


class _WithoutValues(TorchFunctionMode):
    """Disables torch.nn.init, which on the meta device imports torch's compiler for two seconds."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules that are built inside have shapes but no memory: they are on the meta device, and are not initialised."""
    with torch.device("meta"), _WithoutValues():
        yield


def load_parameters(
    module: nn.Module,
    directory: Path,
    rules: Sequence[Rule],
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat = "published",
    aliases: Sequence[tuple[str, str]] = (),
    ignore: Sequence[str] = (),
) -> None:
    """Gives `module`, which was built on the meta device, its memory and its values.

    device: if it is meta, only the headers of the files are checked, and no tensor is read.
    dtype: for all parameters except e4m3 ones and those in `float32_parameters`, a class attribute of their module.
    load_format: "random" reads no file and draws values of a usual scale.
    aliases: (prefix, replacement) pairs for names that other tools write; the first one that matches is applied.
    ignore: patterns (as in Rule) of published tensors that are known and not needed.
    Raises CheckpointError that names the tensor or parameter that does not fit.
    """
    materialise(module, device, dtype)
    if load_format == "random":
        if device.type != "meta":
            fill_random(module, seed=0)
    else:
        places = _places(module, rules)
        scales = _scales(directory, aliases, device)
        seen = _fill_from_shards(directory, places, scales, aliases, ignore)
        if missing := [name for name in places if name not in seen]:
            raise CheckpointError(f"{directory}: missing tensors: {listed(missing)}")
        scales.report(directory, dtype)
        _check_finite(directory, places)
    release_temporaries(device)
    keep_copies(module, device, dtype)


def release_temporaries(device: torch.device) -> None:
    """Gives the device back what loading took beside the weights. If tensors that stay came to lie in it, whole
    segments of the allocator would stay with them."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _fill_from_shards(
    directory: Path,
    places: dict[str, list[_Place]],
    scales: _Scales,
    aliases: Sequence[tuple[str, str]],
    ignore: Sequence[str],
) -> set[str]:
    """Copies each tensor of the files to its places; returns the names of all. CheckpointError for a tensor that occurs
    twice or has no place."""
    ignored = [_pattern(text) for text in ignore]
    seen: dict[str, str] = {}
    unexpected = []
    for name, tensor in _published_tensors(directory, aliases):
        if name in seen:
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name} repeats {seen[name]}")
        seen[name] = f"{tensor.name} of {tensor.file.name}"
        if name in places:
            for place in places[name]:
                _fill(place, scales.applied(name, tensor))
        elif any(pattern.fullmatch(name) for pattern in ignored):
            scales.discard(name)
        elif name not in scales.by_name:
            unexpected.append(tensor.name)
    if unexpected:
        raise CheckpointError(f"{directory}: unexpected tensors: {listed(unexpected)}")
    return set(seen)


def _check_finite(directory: Path, places: dict[str, list[_Place]]) -> None:
    """CheckpointError that names the tensors with NaN or infinite values, as in a damaged file. The weights are read
    once more, on their device, which is waited for once; those in e4m3 were checked when they were quantised."""
    parts = [(name, place) for name in places for place in places[name] if place.scale is None]
    filled = [(name, place.view) for name, place in parts if place.view.numel() and not place.view.is_meta]
    extremes = [torch.stack(torch.aminmax(view)).float() for _, view in filled]
    if extremes and not (finite := torch.stack(extremes).isfinite().all(dim=1)).all():
        names = [name for (name, _), good in zip(filled, finite.tolist(), strict=True) if not good]
        raise CheckpointError(f"{directory}: NaN or infinite values in tensors: {listed(names)}")


def materialise(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replaces the meta parameters of `module` with uninitialised ones on `device` in `dtype`, and moves its
    buffers."""
    for owner in module.modules():
        float32: frozenset[str] = getattr(owner, "float32_parameters", frozenset())
        for name, parameter in owner.named_parameters(recurse=False):
            chosen = torch.float32 if name in float32 else E4M3 if parameter.dtype == E4M3 else dtype
            # Strides are kept: some weights have the memory layout that their GEMM reads.
            values = torch.empty_strided(parameter.shape, parameter.stride(), device=device, dtype=chosen)
            setattr(owner, name, nn.Parameter(values, requires_grad=False))
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.is_meta:
                raise CheckpointError(f"buffer {name} of {type(owner).__name__} holds no values: build it on the CPU")
            setattr(owner, name, buffer.to(device))


def fill_random(module: nn.Module, seed: int) -> None:
    """Draws values of a usual scale on the parameters' device: matrices N(0, 1 / fan_in), norm weights near 1."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter, factors in _targets(module):
        if parameter.is_meta:  # only the shapes of the model are needed
            continue
        generator = generators.get(parameter.device)
        if generator is None:
            generator = generators[parameter.device] = torch.Generator(parameter.device).manual_seed(seed)
        if factors is not None:
            for values, scale in zip(_stack(parameter, 2), _stack(factors, 1), strict=True):
                drawn = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
                drawn.normal_(0.0, values.shape[-1] ** -0.5, generator=generator)
                fill_rows(drawn, values, scale, name)
        elif parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("weight"):
            parameter.normal_(1.0, 0.05, generator=generator)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


def _stack(part: Tensor, dim: int) -> Tensor:
    """`part` as a stack of tensors with `dim` axes each; a single tensor becomes a stack of one."""
    return part if part.dim() > dim else part[None]


def _fill(place: _Place, tensor: PublishedTensor) -> None:
    if tensor.dtype not in _FLOATING:
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name} has dtype {tensor.dtype}, expected {_FLOATING}")
    shape = _published_shape(place)
    if tensor.shape not in (shape, place.shape):
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name} has shape {tensor.shape}, expected {shape}")
    if not place.view.is_meta:
        values = tensor.read()
        exchanged = place.transposed and tensor.shape == shape
        values = (values.mT if exchanged else values).reshape(place.view.shape)
        if place.scale is None:
            place.view.copy_(values)
        else:
            fill_rows(values, place.view, place.scale, f"{tensor.file}: tensor {tensor.name}")


def _published_shape(place: _Place) -> tuple[int, ...]:
    if not place.transposed:
        return place.shape
    *leading, rows, columns = place.shape
    return *leading, columns, rows


class _Scales:
    """The scales of a block-scaled FP8 checkpoint by canonical name, one for each `block` (rows, columns)."""

    def __init__(self, block: tuple[int, int] | None, by_name: dict[str, Tensor]) -> None:
        self.by_name = by_name
        self._block = block
        self._unused = set(by_name)

    def applied(self, name: str, tensor: PublishedTensor) -> PublishedTensor:
        """`tensor` itself; if it is block-scaled FP8, one whose values are dequantised when they are read."""
        if tensor.dtype != block_scaled.DTYPE or self._block is None:
            return tensor
        scale, block = self.by_name.get(name + block_scaled.SUFFIX), self._block
        if scale is None:
            raise CheckpointError(f"{tensor.file}: missing tensor: {tensor.name}{block_scaled.SUFFIX}")
        block_scaled.check_scale(tensor.name, tensor.shape, scale, block)
        self.discard(name)
        return replace(tensor, dtype="F32", read=lambda: block_scaled.dequantised(tensor.read(), scale, block))

    def discard(self, name: str) -> None:
        """Expects no further use of the scales of this weight."""
        self._unused.discard(name + block_scaled.SUFFIX)

    def report(self, directory: Path, dtype: torch.dtype) -> None:
        """Logs what was dequantised; CheckpointError for scales without a weight."""
        if self._unused:
            raise CheckpointError(f"{directory}: unexpected tensors: {listed(sorted(self._unused))}")
        if self.by_name:
            message = "%s: %d weights in FP8 with a scale for each block of %s were dequantised to %s"
            log.info(message, directory, len(self.by_name), self._block, dtype)


def _scales(directory: Path, aliases: Sequence[tuple[str, str]], device: torch.device) -> _Scales:
    block = block_scaled.block_of(directory)
    if block is None:
        return _Scales(None, {})
    by_name = {
        name: tensor.read() if device.type != "meta" else tensor.without_values()
        for name, tensor in _published_tensors(directory, aliases)
        if tensor.name.endswith(block_scaled.SUFFIX)
    }
    return _Scales(block, by_name)


def _published_tensors(directory: Path, aliases: Sequence[tuple[str, str]]) -> Iterator[tuple[str, PublishedTensor]]:
    """Canonical name and tensor of each entry of all files. The values of a tensor can be read until the next one is
    asked for."""
    for path in shard_paths(directory):
        for tensor in weight_files.tensors(path):
            yield _canonical(tensor.name, aliases), tensor


def _places(module: nn.Module, rules: Sequence[Rule]) -> dict[str, list[_Place]]:
    """Every published tensor that the module's parameters need, by name, with the places that it fills."""
    places: dict[str, list[_Place]] = {}
    patterns = [(rule, _pattern(rule.ours)) for rule in rules]
    for name, parameter, factors in _targets(module):
        filled = 0
        for rule, pattern in patterns:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            numbers = match.groupdict()
            stacked = [letter for letter in _wildcards(rule.published) if letter not in numbers]
            for index in range(parameter.shape[0] if stacked else 1):
                view, scale = (parameter[index], _item(factors, index)) if stacked else (parameter, factors)
                numbers.update({letter: str(index) for letter in stacked})
                if rule.rows is not None:
                    view, scale = view[slice(*rule.rows)], _item(scale, slice(*rule.rows))
                published = rule.published.format(**numbers)
                if published in places and not rule.shared:
                    raise CheckpointError(f"two rules read tensor {published}")
                place = _Place(view, rule.shape or tuple(view.shape), rule.transposed, scale)
                places.setdefault(published, []).append(place)
                filled += view.numel()
        if filled != parameter.numel():
            raise CheckpointError(f"parameter {name}: rules fill {filled} of {parameter.numel()} values")
    return places


def _targets(module: nn.Module) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Name, values and scales (of e4m3 weights) of each parameter. An e4m3 weight has the name of what it replaces."""
    weights = {name: child for name, child in module.named_modules() if isinstance(child, E4M3Weight)}
    for name, parameter in module.named_parameters():
        owner, _, own = name.rpartition(".")
        if owner not in weights:
            yield name, parameter, None
        elif own == "values":
            yield owner, parameter, weights[owner].scale


def _item(factors: Tensor | None, index: int | slice) -> Tensor | None:
    return None if factors is None else factors[index]


def published_shapes(module: nn.Module, rules: Sequence[Rule]) -> dict[str, tuple[int, ...]]:
    """Published name and shape of each tensor that `module` needs. The module may be on the meta device."""
    return {name: _published_shape(filled[0]) for name, filled in _places(module, rules).items()}


def _wildcards(text: str) -> list[str]:
    return re.findall(r"{(\w+)}", text)


def _pattern(text: str) -> re.Pattern[str]:
    pieces = re.split(r"{(\w+)}", text)
    pattern = ""
    for literal, wildcard in zip(pieces[::2], [*pieces[1::2], None], strict=True):
        pattern += re.escape(literal)
        if wildcard is not None:
            pattern += rf"(?P<{wildcard}>\d+)" if len(wildcard) == 1 else rf"(?P<{wildcard}>.+)"
    return re.compile(pattern)


def _canonical(name: str, aliases: Sequence[tuple[str, str]]) -> str:
    for prefix, replacement in aliases:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
