"""Strict loading of safetensors checkpoints: every tensor of the files and every parameter of the module is accounted
for, and a missing, unexpected, misshapen or repeated tensor is an error that names it.

A module is built inside `without_memory()`, on the meta device, and gets its memory here, on its device and in its
dtype. So host memory never holds more than one tensor.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.checkpoints import weight_files
from models.checkpoints.published import read_optional_json
from models.checkpoints.quantized import QuantizedTensors, scheme_of_config
from models.checkpoints.weight_files import PublishedTensor, listed, shard_paths
from models.interfaces.errors import CheckpointError
from models.interfaces.rule import Rule
from models.layers.moe import Experts
from models.layers.quantized import E4M3, QuantizedLinear, QuantizedRows, QuantizedWeight, Scheme, keep_copies

log = logging.getLogger(__name__)

LoadFormat = Literal["published", "random"]
Quantization = Literal["none", "fp8"]
"""fp8: linear layers of the language model that are published in 16 bits are held in e4m3, with a scale for each output
feature (models.layers.quantized)."""


class Source(NamedTuple):
    """A checkpoint and how it is loaded: the arguments of models.checkpoints.registry.Family.model."""

    directory: Path
    device: torch.device
    dtype: torch.dtype
    load_format: LoadFormat = "published"
    quantization: Quantization = "none"


_FLOATING = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, eq=False)
class _Place:
    """A part of a parameter that a published tensor fills."""

    parameter: str
    view: Tensor
    shape: tuple[int, ...]
    """The published shape; with `transposed`, before its last two axes are exchanged."""
    transposed: bool = False
    quantized: QuantizedRows | None = None
    """Of a QuantizedWeight; its values are `view`."""


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
    """Gives `module`, which was built on the meta device, its memory and its values. Linear layers and experts of its
    `decoder` that are published as codes are held as these.

    device: if it is meta, only the headers of the files are checked, and no tensor is read.
    dtype: for all parameters except those of QuantizedWeight and in `float32_parameters`, a class attribute of their
        module.
    load_format: "random" reads no file and draws values of a usual scale.
    aliases: (prefix, replacement) pairs for names that other tools write; the first one that matches is applied.
    ignore: patterns (as in Rule) of published tensors that are known and not needed.
    Raises CheckpointError that names the tensor or parameter that does not fit.
    """
    if load_format == "random":
        scheme = scheme_of_config(read_optional_json(directory, "config.json"))
        if scheme is not None:
            _hold(module, lambda name: None if name == "decoder.head.weight" else scheme)
        materialise(module, device, dtype)
        if device.type != "meta":
            fill_random(module, seed=0)
    else:
        quantized = QuantizedTensors(directory, _published_tensors(directory, aliases), device)
        orders = _hold_as_published(module, rules, quantized)
        materialise(module, device, dtype)
        for weight, order in orders:
            if weight.order is not None and device.type != "meta":
                weight.order.copy_(order)
        places = _places(module, rules)
        seen = _fill_from_shards(directory, places, quantized, aliases, ignore)
        if missing := [name for name in places if name not in seen]:
            raise CheckpointError(f"{directory}: missing tensors: {listed(missing)}")
        if quantized.layers:
            log.info("%s: %d quantised weights; %s", directory, len(quantized.layers), _how_held(module, dtype))
        _check_finite(directory, places)
    release_temporaries(device)
    keep_copies(module, device, dtype)


def _hold(module: nn.Module, scheme_of: Callable[[str], Scheme | None]) -> list[tuple[str, QuantizedWeight]]:
    """Replaces the weights of linear layers and experts of `module.decoder`, which is on the meta device, by those that
    hold codes; returns their names and them. scheme_of: the format of a parameter, None for 16 bits."""
    made = []
    decoder = getattr(module, "decoder", None)
    for prefix, owner in [] if decoder is None else list(decoder.named_modules(prefix="decoder")):
        if isinstance(owner, Experts):
            for own in ("gate_up", "down"):
                scheme = scheme_of(f"{prefix}.{own}")
                shape = getattr(owner, own).shape
                if scheme is not None and not scheme.ordered and scheme.fits(*shape[1:]):
                    delattr(owner, own)
                    setattr(owner, own, QuantizedWeight(*shape, scheme=scheme))
                    made.append((f"{prefix}.{own}", getattr(owner, own)))
            continue
        for own, child in list(owner.named_children()):
            if not isinstance(child, (nn.Linear, QuantizedLinear)) or own in getattr(owner, "sixteen_bit_layers", ()):
                continue
            scheme = scheme_of(f"{prefix}.{own}.weight")
            if scheme is not None and scheme.fits(child.out_features, child.in_features):
                layer = QuantizedLinear(child, scheme)
                setattr(owner, own, layer)
                made.append((f"{prefix}.{own}.weight", layer.weight))
    return made


def _hold_as_published(
    module: nn.Module, rules: Sequence[Rule], quantized: QuantizedTensors
) -> list[tuple[QuantizedWeight, Tensor]]:
    """`_hold` for the parameters whose parts are all published in one format. Returns those with reordered inputs, and
    their order."""
    if not quantized.layers:
        return []
    sources: dict[str, list[str]] = {}
    for name, places in _places(module, rules).items():
        for place in places:
            sources.setdefault(place.parameter, []).append(name)

    def scheme_of(parameter: str) -> Scheme | None:
        names = sources.get(parameter, [])
        schemes = {quantized.scheme_of(name) for name in names}
        scheme = schemes.pop() if len(schemes) == 1 else None
        if scheme is not None and scheme.ordered:
            first, *others = (quantized.order_of(name) for name in names)
            assert first is not None
            if not all(other is not None and torch.equal(first, other) for other in others):
                return None
        return scheme

    made = _hold(module, scheme_of)
    orders = [(weight, quantized.order_of(sources[name][0])) for name, weight in made if weight.order is not None]
    return [(weight, order) for weight, order in orders if order is not None]


def _how_held(module: nn.Module, dtype: torch.dtype) -> str:
    """For the log: in which forms weights are held."""
    counts = Counter(child.scheme.codes for child in module.modules() if isinstance(child, QuantizedWeight))
    return f"held as they are: {dict(counts)}, others as {dtype}"


def release_temporaries(device: torch.device) -> None:
    """Gives the device back what loading took beside the weights. If tensors that stay came to lie in it, whole
    segments of the allocator would stay with them."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _fill_from_shards(
    directory: Path,
    places: dict[str, list[_Place]],
    quantized: QuantizedTensors,
    aliases: Sequence[tuple[str, str]],
    ignore: Sequence[str],
) -> set[str]:
    """Copies each tensor of the files to its places; returns the names of all. CheckpointError for a tensor that occurs
    twice or has no place."""
    ignored = [_pattern(text) for text in ignore]
    seen: dict[str, str] = {}
    unexpected = []
    for published, stored in _published_tensors(directory, aliases):
        if (found := quantized.logical(published, stored)) is None:
            continue
        name, tensor = found
        if name in seen:
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name} repeats {seen[name]}")
        seen[name] = f"{tensor.name} of {tensor.file.name}"
        if name in places:
            for place in places[name]:
                _fill(place, tensor)
        elif not any(pattern.fullmatch(name) for pattern in ignored) and not quantized.zero_bias(name, tensor):
            unexpected.append(tensor.name)
    if unexpected:
        raise CheckpointError(f"{directory}: unexpected tensors: {listed(unexpected)}")
    return set(seen)


def _check_finite(directory: Path, places: dict[str, list[_Place]]) -> None:
    """CheckpointError that names the tensors with NaN or infinite values, as in a damaged file. The weights are read
    once more, on their device, which is waited for once."""
    parts = [
        (name, place.view if place.quantized is None else place.quantized.scale)
        for name in places
        for place in places[name]
    ]
    parts += [
        (name, place.view.view(torch.uint8)) for name in places for place in places[name] if place.view.dtype == E4M3
    ]
    filled = [(name, view) for name, view in parts if view.numel() and not view.is_meta]
    extremes = [_extremes(view) for _, view in filled]
    if extremes and not (finite := torch.stack(extremes).isfinite().all(dim=1)).all():
        names = [name for (name, _), good in zip(filled, finite.tolist(), strict=True) if not good]
        raise CheckpointError(f"{directory}: NaN or infinite values in tensors: {listed(names)}")


def _extremes(values: Tensor) -> Tensor:
    """The least and the largest value; those of bytes of e4m3 are NaN if there is one."""
    if values.dtype != torch.uint8:
        return torch.stack(torch.aminmax(values)).float()
    # NaN is 0x7F and 0xFF, the largest of either sign.
    largest = torch.stack((values.view(torch.int8).amax(), values.amax())).float()
    return torch.where(largest == largest.new_tensor((127.0, 255.0)), torch.nan, largest)


def materialise(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replaces the meta parameters of `module` with uninitialised ones on `device` in `dtype`, and moves its buffers.
    CheckpointError if a GPU has no room for them."""
    kinds = {
        (owner, name): _kind_of(owner, name, dtype)
        for owner in module.modules()
        for name, _ in owner.named_parameters(recurse=False)
    }
    if device.type == "cuda":
        needed = sum(getattr(owner, name).numel() * kind.itemsize for (owner, name), kind in kinds.items())
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
        if needed / 2**30 > free:
            raise CheckpointError(
                f"weights of {needed / 2**30:.1f} GiB do not fit: {free:.1f} of the GPU's {total:.1f} GiB are free"
            )
    for (owner, name), kind in kinds.items():
        parameter = getattr(owner, name)
        # Strides are kept: some weights have the memory layout that their GEMM reads.
        values = torch.empty_strided(parameter.shape, parameter.stride(), device=device, dtype=kind)
        setattr(owner, name, nn.Parameter(values, requires_grad=False))
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.is_meta:
                raise CheckpointError(f"buffer {name} of {type(owner).__name__} holds no values: build it on the CPU")
            setattr(owner, name, buffer.to(device))


def _kind_of(owner: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter in a model of `dtype`."""
    if isinstance(owner, QuantizedWeight):
        return getattr(owner, name).dtype
    return torch.float32 if name in getattr(owner, "float32_parameters", ()) else dtype


def fill_random(module: nn.Module, seed: int) -> None:
    """Draws values of a usual scale on the parameters' device: matrices N(0, 1 / fan_in), norm weights near 1."""
    generator = torch.Generator(next(module.parameters()).device).manual_seed(seed)
    for name, parameter, whole in _targets(module):
        if whole is not None:
            for rows in [whole] if parameter.dim() == 2 else map(whole.at, range(parameter.shape[0])):
                rows.draw(generator)
        elif parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("weight"):
            parameter.normal_(1.0, 0.05, generator=generator)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


def _fill(place: _Place, tensor: PublishedTensor) -> None:
    if tensor.dtype not in _FLOATING:
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name} has dtype {tensor.dtype}, expected {_FLOATING}")
    shape = _published_shape(place)
    if tensor.shape not in (shape, place.shape):
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name} has shape {tensor.shape}, expected {shape}")
    if place.view.is_meta:
        return
    exchanged = place.transposed and tensor.shape == shape
    if place.quantized is not None and tensor.codes is not None:
        codes = tensor.codes()
        place.quantized.fill(codes.mT if exchanged else codes)
        return
    values = tensor.read()
    values = (values.mT if exchanged else values).reshape(place.view.shape)
    if place.quantized is None:
        place.view.copy_(values)
    else:
        place.quantized.quantise(values, f"{tensor.file}: tensor {tensor.name}")


def _published_shape(place: _Place) -> tuple[int, ...]:
    if not place.transposed:
        return place.shape
    *leading, rows, columns = place.shape
    return *leading, columns, rows


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
    for name, parameter, whole in _targets(module):
        filled = 0
        for rule, pattern in patterns:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            numbers = match.groupdict()
            stacked = [letter for letter in re.findall(r"{(\w+)}", rule.published) if letter not in numbers]
            for index in range(parameter.shape[0] if stacked else 1):
                view, quantized = parameter, whole
                for part in ([index] if stacked else []) + ([slice(*rule.rows)] if rule.rows is not None else []):
                    view, quantized = view[part], None if quantized is None else quantized.at(part)
                numbers.update({letter: str(index) for letter in stacked})
                published = rule.published.format(**numbers)
                if published in places and not rule.shared:
                    raise CheckpointError(f"two rules read tensor {published}")
                shape = rule.shape or tuple(view.shape)
                if quantized is not None:
                    shape = (*shape[:-1], quantized.inputs)
                places.setdefault(published, []).append(_Place(name, view, shape, rule.transposed, quantized))
                filled += view.numel()
        if filled != parameter.numel():
            raise CheckpointError(f"parameter {name}: rules fill {filled} of {parameter.numel()} values")
    return places


def _targets(module: nn.Module) -> Iterator[tuple[str, Tensor, QuantizedRows | None]]:
    """Name and values of each parameter, and of a QuantizedWeight, which has the name of what it replaces, all that it
    holds."""
    weights = {name: child for name, child in module.named_modules() if isinstance(child, QuantizedWeight)}
    for name, parameter in module.named_parameters():
        owner, _, own = name.rpartition(".")
        if owner not in weights:
            yield name, parameter, None
        elif own == "values":
            yield owner, parameter, weights[owner].rows


def published_shapes(module: nn.Module, rules: Sequence[Rule]) -> dict[str, tuple[int, ...]]:
    """Published name and shape of each tensor that `module` needs. The module may be on the meta device."""
    return {name: _published_shape(filled[0]) for name, filled in _places(module, rules).items()}


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
