"""Cost and quality of quantised weights (`--quantization fp8`, and as published), compared with bfloat16.

python -m benchmarks.quantization decode [qwen2_vl_2b qwen2_vl_7b ...]   --quantization fp8 at full size, on a GPU
python -m benchmarks.quantization published [qwen2_vl_7b qwen3_vl_30b_a3b]   published forms with random codes, on a GPU
python -m benchmarks.quantization quality [--number N]   on a CPU, after `make fonts`

`quality` follows the greedy answers of a reference in float32: by token, the Kullback-Leibler divergence from its
distribution, and whether the most probable token is the same. The embedded chat model is asked the questions of its
gates, N of each, and is quantised by rounding to the nearest code, without calibration. Its reference are the weights
in 16 bits; that of tests/golden/quantised, whose weights are random, are the dequantised ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from benchmarks.checkpoints.published import make
from benchmarks.checkpoints.quantised import quantised
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import Row, record, table
from benchmarks.steps.full_size import free, measure_each
from models.checkpoints.checkpoint import Quantization
from models.checkpoints.registry import family_of, resolve
from models.interfaces.media import ChatMessage, ContentPart, MediaItem, Prompt, VideoFrames, VideoMetadata
from models.layers import gemm
from models.layers.quantized import QuantizedWeight, Weight, ordered, quantise_rows
from models.protocol import ChatModel
from models.text.processor import ChatProcessor
from tests.support.chat_golden import generate, golden_prompt
from tests.support.golden import GOLDEN, inputs, prompts
from tests.support.prompts import prompt_of
from training.vision.conversations import Example
from training.vision.gates import NAMES, examples
from training.vision.network import PUBLISHED
from training.vision.pictures import Picture

CPU = torch.device("cpu")
MOST_ROWS_OF_16_BITS = 64
"""As on a GPU that multiplies e4m3 (models.layers.kernels.gemm), where it applies to most layers; here it applies to
all."""


Forms = Mapping[str, tuple[Path, Quantization]]
"""Directory and setting by label; "none" is bfloat16."""


def measured(name: str, forms: Forms, device: torch.device, **sizes: Any) -> list[Row]:
    """Rows of one model in each form, one after the other on the same GPU; each has the ratio of its time to that of
    bfloat16. sizes: of benchmarks.decode.measure."""
    rows: list[Row] = []
    for label, (directory, quantization) in forms.items():
        found = decode.measure(name, directory, device, quantization, **sizes)
        rows += ({"quantization": label, **row} for row in found)
        free()
    plain = {(row["kind"], row["rows"]): row["replay_ms"] for row in rows if row["quantization"] == "none"}
    return [{**row, "of_bfloat16": row["replay_ms"] / plain[row["kind"], row["rows"]]} for row in rows]


def with_setting(name: str, directory: Path, device: torch.device) -> list[Row]:
    return measured(name, {"none": (directory, "none"), "fp8": (directory, "fp8")}, device)


PUBLISHED_FORMS = {"qwen2_vl_7b": ("awq", "fp8"), "qwen3_vl_30b_a3b": ("fp8",)}


def as_published(name: str, directory: Path, device: torch.device) -> list[Row]:
    forms: dict[str, tuple[Path, Quantization]] = {"none": (directory, "none")}
    forms |= {form: (make(name, directory.parent, form), "none") for form in PUBLISHED_FORMS[name]}
    return measured(name, forms, device, batches=(1, 8, 32), prefills=(1024,))


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
    """dtype: of activations, and of weights that are not quantised. form: that the checkpoint is quantised in."""

    name: str
    dtype: torch.dtype = torch.float32
    quantization: Quantization = "none"
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    form: str = ""


def eight_bit_prefills() -> AbstractContextManager[Any]:
    """Activations of many rows are rounded to e4m3, too, in every linear layer of the language model."""
    plain = gemm.linear

    def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, QuantizedWeight) and x.numel() > MOST_ROWS_OF_16_BITS * x.shape[-1]:
            values, scale = quantise_rows(x)
            x = (ordered(values).to(torch.float32) * scale[..., None]).to(x.dtype)
        return plain(x, weight, bias)

    return patch.object(gemm, "linear", linear)


AS_THEY_ARE = (Variant("float32"), Variant("bfloat16", torch.bfloat16))
"""The first variant is the reference of the others."""
VARIANTS = (
    *AS_THEY_ARE,
    Variant("fp8", quantization="fp8"),
    Variant("fp8, prefills in 8 bits", quantization="fp8", within=eight_bit_prefills),
    Variant("FP8, blocks of 128 x 128", form="fp8"),
    Variant("GPTQ, groups of 64", form="gptq, groups of 64"),
    Variant("GPTQ, groups of 128", form="gptq"),
    Variant("GPTQ with zeros, groups of 128", form="gptq, asymmetric"),
    Variant("AWQ, groups of 64", form="awq, groups of 64"),
)
"""Groups of AWQ do not end within the inputs of a layer; 192 are no multiple of 128."""


def compare(
    directory: Path, variants: Sequence[Variant], asked: Sequence[Asked], stops: frozenset[int]
) -> Iterator[Row]:
    """A row for each variant of the model in `directory`."""
    load = resolve(family_of(directory).model)
    reference: list[tuple[list[int], Tensor]] = []
    for variant in variants:
        with TemporaryDirectory() as folder:
            where = quantised(directory, Path(folder), variant.form) if variant.form else directory
            model: ChatModel = load(where, CPU, variant.dtype, "published", variant.quantization)
        kept = Kept()
        with variant.within():
            for index, one in enumerate(asked):
                if variant is variants[0]:
                    _, logits, ids = generate(model, one.prompt, one.limit)
                    length = next((n + 1 for n, token in enumerate(ids) if token in stops), len(ids))
                    reference.append((ids[:length], logits[:length].double().log_softmax(-1)))
                _add(kept, model, one, *reference[index], stops)
        yield {"variant": variant.name, **kept.row()}


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
    facts = {"questions_of_each_gate": number, "gates": len(NAMES)}
    processor: ChatProcessor = resolve(family_of(PUBLISHED).processor)(PUBLISHED)
    asked = [one for _, one in of_gates(processor, number)]
    for row in compare(PUBLISHED, VARIANTS, asked, frozenset(processor.stop_token_ids)):
        yield {"model": "embedded", **row}, facts
    for directory in sorted(config.parent for config in (GOLDEN / "quantised").glob("*/config.json")):
        processor, limit = resolve(family_of(directory).processor)(directory), inputs(directory)["max_new_tokens"]
        asked = [Asked(golden_prompt(processor, directory, name), limit) for name in prompts(directory)]
        for row in compare(directory, AS_THEY_ARE, asked, frozenset()):
            yield {"model": directory.name, **row}, facts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("benchmarks.quantization", __doc__)
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("decode").add_argument("names", nargs="*", default=["qwen2_vl_2b"])
    what.add_parser("published").add_argument("names", nargs="*", default=[*PUBLISHED_FORMS])
    what.add_parser("quality").add_argument("--number", type=int, default=10, help="questions of each gate")
    options = parser.parse_args(arguments)
    if options.what == "quality":
        with torch.inference_mode():
            record("quantization_quality", quality(options.number))
    else:
        measure = as_published if options.what == "published" else with_setting
        print(table(measure_each(f"quantization_{options.what}", options.names, measure)))


if __name__ == "__main__":
    main()
