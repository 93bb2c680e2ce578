"""Cost and quality of quantised weights (`--quantization fp8`, and as published), compared with bfloat16.

python -m benchmarks.quantization decode [qwen2_vl_2b qwen2_vl_7b ...]   steps and prefills at full size, on a GPU
python -m benchmarks.quantization quality [--number N]   on a CPU, after `make fonts`

`quality` follows the greedy answers of the weights in float32: by token, the Kullback-Leibler divergence from their
distribution, and whether the most probable token is the same. Questions are those of the embedded chat model's gates, N
of each, and the prompts of the golden miniatures, whose weights are random.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from torch import Tensor

from benchmarks import decode
from benchmarks.checkpoints.four_bits import in_four_bits
from benchmarks.checkpoints.published import QUANTIZED, make
from benchmarks.measure.record import Row, record, table
from benchmarks.steps.full_size import free, measure_each
from models.checkpoints.checkpoint import Quantization
from models.checkpoints.registry import family_of, resolve
from models.interfaces.media import ChatMessage, ContentPart, MediaItem, Prompt, VideoFrames, VideoMetadata
from models.interfaces.processor import ChatProcessor
from models.layers import gemm
from models.layers.quantized import QuantizedWeight, Weight, ordered, quantise_rows
from models.protocol import ChatModel
from tests.support.chat_golden import generate, golden_prompt
from tests.support.golden import GOLDEN, inputs, prompts
from tests.support.prompts import prompt_of
from training.vision.conversations import Example
from training.vision.gates import NAMES, examples
from training.vision.pictures import Picture
from training.vision.vocabulary import PUBLISHED

CPU = torch.device("cpu")
MOST_ROWS_OF_16_BITS = 64
"""As on a GPU that multiplies e4m3 (models.layers.kernels.gemm), where it applies to most layers; here it applies to
all."""


def all_forms(name: str, directory: Path, device: torch.device) -> list[Row]:
    """Rows of one model in each form, measured one after the other on the same GPU; each has the ratio of the first
    row's time to its own."""
    rows: list[Row] = []
    published = {key: make(name, directory.parent, key) for key in QUANTIZED}
    forms: list[tuple[str, Path, Quantization]] = [("none", directory, "none"), ("fp8", directory, "fp8")]
    for label, where, quantization in [*forms, *((f"published {key}", at, "none") for key, at in published.items())]:
        found = decode.measure(name, where, device, quantization)
        rows += ({"quantization": label, **row} for row in found)
        free()
    plain = {(row["kind"], row["rows"]): row["replay_ms"] for row in rows if row["quantization"] == "none"}
    return [{**row, "of_bfloat16": row["replay_ms"] / plain[row["kind"], row["rows"]]} for row in rows]


@dataclass(frozen=True)
class Asked:
    """wanted: tokens of the right answer; empty if there is none. limit: of the answer's tokens, its end included."""

    prompt: Prompt
    limit: int
    wanted: tuple[int, ...] = ()


@dataclass
class Kept:
    """How well a variant agrees with the answers in float32, by token and by answer."""

    divergences: list[Tensor] = field(default_factory=list)
    same_tokens: list[Tensor] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)

    def row(self) -> Row:
        divergence, same = torch.cat(self.divergences), torch.cat(self.same_tokens)
        return {
            "answers": len(self.same_tokens),
            "tokens": len(same),
            "kl_mean": float(divergence.mean()),
            "kl_p99": float(divergence.quantile(0.99)),
            "kl_most": float(divergence.max()),
            "same_tokens": float(same.double().mean()),
            "same_answers": sum(bool(one.all()) for one in self.same_tokens) / len(self.same_tokens),
            "right_answers": sum(self.right) / len(self.right) if self.right else None,
        }


@dataclass(frozen=True)
class Variant:
    """dtype: of activations, and of weights that are not quantised. group: of inputs that share a scale in 4 bits, 0:
    the checkpoint's own weights."""

    name: str
    dtype: torch.dtype
    quantization: Quantization
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    group: int = 0


def eight_bit_prefills() -> AbstractContextManager[Any]:
    """Activations of many rows are rounded to e4m3, too, in every linear layer of the language model."""
    plain = gemm.linear

    def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, QuantizedWeight) and x.numel() > MOST_ROWS_OF_16_BITS * x.shape[-1]:
            values, scale = quantise_rows(x)
            x = (ordered(values).to(torch.float32) * scale[..., None]).to(x.dtype)
        return plain(x, weight, bias)

    return patch.object(gemm, "linear", linear)


VARIANTS = (
    Variant("float32", torch.float32, "none"),
    Variant("bfloat16", torch.bfloat16, "none"),
    Variant("fp8", torch.float32, "fp8"),
    Variant("fp8, prefills in 8 bits", torch.float32, "fp8", eight_bit_prefills),
    Variant("4 bits, groups of 32", torch.float32, "none", group=32),
)
"""The first variant is the reference of the others."""


def compare(directory: Path, asked: Sequence[Asked], stops: frozenset[int]) -> Iterator[Row]:
    """A row for each variant of the model in `directory`, and what its decoder's parameters take in bfloat16."""
    load = resolve(family_of(directory).model)
    reference: list[tuple[list[int], Tensor]] = []
    for variant in VARIANTS:
        with TemporaryDirectory() as folder:
            where = in_four_bits(directory, Path(folder), variant.group) if variant.group else directory
            model: ChatModel = load(where, CPU, variant.dtype, "published", variant.quantization)
        kept = Kept()
        with variant.within():
            for index, one in enumerate(asked):
                if variant is VARIANTS[0]:
                    _, logits, ids = generate(model, one.prompt, one.limit)
                    length = next((n + 1 for n, token in enumerate(ids) if token in stops), len(ids))
                    reference.append((ids[:length], logits[:length].double().log_softmax(-1)))
                _add(kept, model, one, *reference[index], stops)
        yield {"variant": variant.name, **kept.row(), "decoder_bytes": _bytes_in_bfloat16(model)}


def _add(kept: Kept, model: ChatModel, one: Asked, ids: list[int], expected: Tensor, stops: frozenset[int]) -> None:
    _, logits, _ = generate(model, one.prompt, len(ids), forced=ids)
    found = logits.double().log_softmax(-1)
    kept.divergences.append((expected.exp() * (expected - found)).nan_to_num(0.0).sum(-1))
    same = found.argmax(-1) == torch.tensor(ids)
    kept.same_tokens.append(same)
    if one.wanted:
        said = ids if same.all() else generate(model, one.prompt, one.limit)[2]
        end = next((index for index, token in enumerate(said) if token in stops), None)
        kept.right.append(end is not None and tuple(said[:end]) == one.wanted)


def _bytes_in_bfloat16(model: ChatModel) -> int:
    """Factors and norms in float32 are not changed."""
    parameters = dict(model.decoder.named_parameters())  # type: ignore[attr-defined]
    small = {name for name, one in parameters.items() if one.element_size() == 1}
    factors = {name for name in parameters if f"{name.removesuffix('scale')}values" in small}
    return sum(one.numel() * (1 if n in small else 4 if n in factors else 2) for n, one in parameters.items())


def of_gates(processor: ChatProcessor, number: int) -> Iterator[tuple[str, Asked]]:
    for name in NAMES:
        for example in examples(name, number):
            yield name, _asked(processor, example)


def _asked(processor: ChatProcessor, example: Example) -> Asked:
    items = [_item(processor, picture) for picture in example.pictures]
    messages = []
    for index, turn in enumerate(example.conversations[0]):
        shown = [ContentPart(item=number) for number in range(len(items))] if index == 0 else []
        messages.append(ChatMessage("user", (*shown, ContentPart(text=turn.question))))
        messages.append(ChatMessage("assistant", (ContentPart(text=turn.answer),)))
    wanted = tuple(processor.tokenize(example.conversations[0][-1].answer))
    return Asked(prompt_of(processor, messages[:-1], items), len(wanted) + 1, wanted)


def _item(processor: ChatProcessor, picture: Picture) -> MediaItem:
    frames = tuple(picture.frames)
    if len(frames) == 1:
        return processor.image(Image.fromarray(frames[0]))
    height, width, _ = frames[0].shape
    metadata = VideoMetadata(len(frames), 2.0, len(frames) / 2, height, width)
    indices = tuple(range(len(frames)))
    return processor.video(VideoFrames(frames, indices, tuple(index / 2 for index in indices), metadata))


def quality(number: int) -> Iterator[tuple[Row, dict[str, Any]]]:
    processor: ChatProcessor = resolve(family_of(PUBLISHED).processor)(PUBLISHED)
    asked = [one for _, one in of_gates(processor, number)]
    for row in compare(PUBLISHED, asked, frozenset(processor.stop_token_ids)):
        yield {"model": "embedded", **row}, {"questions_of_each_gate": number, "gates": len(NAMES)}
    for directory in sorted(config.parent for config in GOLDEN.glob("*/config.json")):
        if family_of(directory).kind != "chat":
            continue
        processor, limit = resolve(family_of(directory).processor)(directory), inputs(directory)["max_new_tokens"]
        asked = [Asked(golden_prompt(processor, directory, name), limit) for name in prompts(directory)]
        for row in compare(directory, asked, frozenset()):
            yield {"model": directory.name, **row}, {"questions_of_each_gate": number, "gates": len(NAMES)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("decode").add_argument("names", nargs="*", default=["qwen2_vl_2b"])
    what.add_parser("quality").add_argument("--number", type=int, default=10, help="questions of each gate")
    options = parser.parse_args(arguments)
    if options.what == "quality":
        with torch.inference_mode():
            record("quantization_quality", quality(options.number))
    else:
        print(table(measure_each("quantization_decode", options.names, all_forms)))


if __name__ == "__main__":
    main()
