"""Benchmarks of full-size models, as far as they go without a GPU: at tiny sizes, and without weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import decode, encoder, quantization
from benchmarks.checkpoints.published import GOLDEN
from benchmarks.checkpoints.quantised import FORMS, quantised
from benchmarks.measure import timing
from benchmarks.steps import decoder
from benchmarks.steps.encoder import pictures
from benchmarks.steps.full_size import load
from models.checkpoints.registry import family_of, resolve
from models.layers.quantized import QuantizedLinear
from models.qwen_vl.v3_5.model import load_model
from models.text.processor import ChatProcessor
from service.engine.chat.slot_state import IntColumn
from service.graphs.pool import GraphPool
from service.hub.catalog import embedded_models
from tests.support.inference import no_gradients as no_gradients

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed runs once, in short contexts: rows are looked at here, not times."""

    def milliseconds(call: Callable[[], object], repeats: int = 1) -> dict[str, float]:
        return timing.milliseconds(call, repeats=1, warm_up=0)

    def host_milliseconds(call: Callable[[], object], repeats: int = 1) -> float:
        return timing.host_milliseconds(call, repeats=1)

    for module in (decode, encoder):
        monkeypatch.setattr(module, "milliseconds", milliseconds)
    monkeypatch.setattr(decode, "host_milliseconds", host_milliseconds)
    monkeypatch.setattr(decoder, "MAX_CONTEXT", decoder.CONTEXT + decoder.ROOM)


@pytest.fixture(scope="module")
def tiny() -> Path:
    """The embedded chat model."""
    return next(Path(path) for path in embedded_models() if family_of(Path(path)).kind == "chat")


def test_rows_of_encoder_and_decode(tiny: Path) -> None:
    processor: ChatProcessor = resolve(family_of(tiny).processor)(tiny)
    model = load(tiny, CPU)
    items = pictures(64, 48, 2)[1](processor)
    seen = encoder.measure_one("qwen2_vl_2b", "2 x 64x48", model.encoder, items, GraphPool(CPU, 1 << 30))
    assert seen["patches"] == sum(item.num_patches for item in items) <= seen["bucket"]
    assert seen["embeds"] == sum(item.num_embeds for item in items)
    rows = [seen]
    for decoded in (model.decoder, load(GOLDEN / "qwen3_5", CPU).decoder):
        step = decode.measure_decode("tiny", decoded, 2, GraphPool(CPU, 1 << 30))
        prefill = decode.measure_prefill("tiny", decoded, 24, GraphPool(CPU, 1 << 30))
        assert (prefill["kind"], prefill["rows"]) == ("prefill", 24)
        assert (step["rows"], step["context"]) == (2, decoder.CONTEXT) and step["host_ms"] > 0
        rows += [step, prefill]
    for row in rows:
        assert row["over_floor"] == row["replay_ms"] / row["floor_ms"]
        assert min(row["eager_ms"], row["replay_ms"], row["graph_ms"], row["floor_ms"]) > 0


def test_forms_beside_bfloat16(tiny: Path) -> None:
    forms: quantization.Forms = {"none": (tiny, "none"), "awq": (GOLDEN / "quantised/awq", "none")}
    rows = quantization.measured("tiny", forms, CPU, batches=(2,), prefills=(24,))
    assert [(row["quantization"], row["kind"]) for row in rows] == [
        (form, kind) for form in forms for kind in ("decode", "prefill")
    ]
    for row, plain in zip(rows, rows[:2] * 2, strict=True):
        assert row["of_bfloat16"] == row["replay_ms"] / plain["replay_ms"]


@pytest.mark.parametrize(
    ("form", "least", "most"), [(form, *((0.02, 0.03) if form == "fp8" else (0.08, 0.14))) for form in FORMS]
)
def test_written_forms_are_read(tiny: Path, tmp_path: Path, form: str, least: float, most: float) -> None:
    """By the relative error of each layer, which is that of rounding to the nearest code."""
    family = resolve(family_of(tiny).model)
    directory = quantised(tiny, tmp_path / "made", form)
    plain, made = (dict(family(at, CPU, torch.float32).decoder.named_modules()) for at in (tiny, directory))
    held = {name: layer.weight for name, layer in made.items() if isinstance(layer, QuantizedLinear)}
    assert len(held) >= 6
    for name, weight in held.items():
        error = (weight.dequantised(torch.float32) - plain[name].weight).norm() / plain[name].weight.norm()
        assert least < error < most, name


def test_a_step_with_drafts() -> None:
    drafting = load_model(GOLDEN / "qwen3_5", CPU, torch.bfloat16, "random", drafter=True).decoder
    runner, plan, state = decoder.captured_decode("tiny", drafting, 2, GraphPool(CPU, 1 << 30), drafts=3)
    assert runner.run(plan).route == "replay"
    assert (state.ints[1:, IntColumn.LENGTH] > decoder.CONTEXT).all() and (state.drafts[1:] >= 0).all()
