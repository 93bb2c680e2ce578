"""Adapters through the worker: the audio of weights that were merged by hand, in any mixture of rows."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.interfaces.errors import CheckpointError
from service.link.messages import SpeechRequest
from tests.engine.speech.rig import Heard, WorkerRig, same
from tests.engine.speech.test_worker import TEXTS, request, segment
from tests.models.voxcpm2 import golden
from tests.support.devices import DEVICES
from tests.support.lora import GROUPS, merge, random_adapter, write_adapter

pytestmark = pytest.mark.usefixtures("exact_products")

ADAPTERS = {
    "anna": {"rank": 4, "alpha": 8.0, "seed": 1, "groups": GROUPS},
    "bela": {"rank": 16, "alpha": 16.0, "seed": 2, "groups": ("lm", "dit")},
    "cora": {"rank": 20, "alpha": 5.0, "seed": 3, "groups": ("dit", "lm_to_dit_proj")},
}


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    made = ADAPTERS[name]
    return random_adapter(golden.DIRECTORY, made["rank"], made["seed"], made["groups"])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name, made in ADAPTERS.items():
        write_adapter(folder / name, tensors_of(name), made["rank"], made["alpha"])  # type: ignore[arg-type]
    return folder


def requests() -> list[SpeechRequest]:
    """Each adapter, and none, in turn; two numbers of solver steps; one in two segments."""
    names = ("anna", "", "bela", "anna", "cora", "", "bela", "cora")
    return [
        request(
            f"{i}",
            segment(TEXTS[i % 5], 4 + i % 3),
            *([segment(TEXTS[3], 3)] if i == 3 else []),
            adapter=name,
            seed=i,
            solver_steps=(10, 4)[i == 6],
        )
        for i, name in enumerate(names)
    ]


def merged_alone(device: str) -> dict[str, Heard]:
    """Every request on a model of its own weights, without any adapter, eagerly."""
    heard: dict[str, Heard] = {}
    for name in ("", *ADAPTERS):
        model = golden.never_stopping(device)
        if name:
            merge(model, tensors_of(name), ADAPTERS[name]["alpha"] / ADAPTERS[name]["rank"])  # type: ignore[operator]
        rig = WorkerRig(model, graphs=False, device=device)
        for one in requests():
            if one.adapter == name:
                plain = request(one.request_id, *one.segments, seed=one.seed, solver_steps=one.solver_steps)
                heard[one.request_id] = rig.alone(plain)
    return heard


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest) -> dict[str, Heard]:
    return merged_alone(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [True, False], ids=["replayed", "eager"])
@pytest.mark.parametrize(
    ("expected", "device"),
    [pytest.param(*param.values * 2, marks=param.marks) for param in DEVICES],
    indirect=["expected"],
)
def test_mixed_batches_sound_like_merged_weights_alone(
    folder: Path, expected: dict[str, Heard], device: str, graphs: bool
) -> None:
    rig = WorkerRig(
        golden.never_stopping(device),
        graphs=graphs,
        max_running=8,
        buckets=(1, 4, 8),
        device=device,
        capture_all=True,
        lora_voices=str(folder),
    )
    lot = random.Random(3)
    rig.first_patches_in_rows(lambda: lot.random() < 0.5)
    rig.observations.drain()
    arrivals = requests()
    heard = rig.run({i: [one] for i, one in enumerate(arrivals)})
    assert len(heard) == len(arrivals)
    for name, got in heard.items():
        assert got.failed is None
        same(got, expected[name])
    voices = {name: expected[name].patches[0].tobytes() for name in ("0", "1", "2", "4")}
    assert len(set(voices.values())) == 4
    rig.assert_clean()
    routes = {route for kind, route in rig.routes() if kind in ("decode", "tail")}
    assert routes == ({"replay"} if graphs else {"eager"})


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_an_adapter_are_the_same_to_the_bit_beside_rows_with_one(folder: Path, device: str) -> None:
    base = request("base", segment(TEXTS[0], 6))

    def patches(*others: SpeechRequest) -> np.ndarray:
        rig = WorkerRig(
            golden.never_stopping(device), buckets=(4,), device=device, capture_all=True, lora_voices=str(folder)
        )
        return rig.run({0: [base, *others]})["base"].latents

    with_anna = request("other", segment(TEXTS[1], 6), adapter="anna")
    without = request("other", segment(TEXTS[1], 6))
    np.testing.assert_array_equal(patches(with_anna), patches(without))


def test_a_batch_without_adapters_replays_the_graph_of_a_server_without_them(folder: Path) -> None:
    rig = WorkerRig(golden.never_stopping("cpu"), capture_all=True, lora_voices=str(folder))
    runner = rig.worker._runner
    adapted = runner.variants[1]

    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("no row has an adapter")

    for graphs in (*adapted.decode.values(), *adapted.others):
        graphs.run = refused  # type: ignore[method-assign]
    assert rig.alone(request("plain")).failed is None


def test_an_adapter_that_is_not_there(folder: Path) -> None:
    for directory in (str(folder), ""):
        failed = WorkerRig(golden.never_stopping("cpu"), lora_voices=directory).alone(request("x", adapter="dora"))
        assert failed.failed is not None and failed.failed.status == 404 and failed.failed.code == "voice_not_found"


# Files


def changed(folder: Path, **changes: object) -> Path:
    """A good adapter, then what the changes say; None removes a tensor."""
    write_adapter(folder / "bad", tensors_of("bela"), 16, 16.0)
    weights = folder / "bad" / "lora_weights.safetensors"
    tensors: dict[str, object] = load_file(weights) | {}
    tensors |= changes
    save_file({name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}, weights)
    return folder


def start(folder: Path) -> None:
    WorkerRig(golden.never_stopping("cpu"), lora_voices=str(folder))


A = "base_lm.layers.0.self_attn.q_proj.lora_A"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {A: torch.zeros(16, 7)},
            rf"bad/lora_weights.safetensors: {A} has shape \[16, 7\], this model needs \[16, 64\]",
        ),
        ({A: None}, r"q_proj.lora_B is there and .*q_proj.lora_A is missing"),
        ({"base_lm.layers.0.mlp.up_proj.lora_A": torch.zeros(16, 64)}, r"mlp.up_proj.lora_A is no adapter of a layer"),
        ({A: torch.full((16, 64), float("nan"))}, rf"{A} has values that are not finite in torch.float32"),
        ("{", r"lora_config\.json cannot be read"),
        (json.dumps({"lora_config": {"r": 0, "alpha": 1}}), "lora_config.r must be an integer from 1 to 256, not 0"),
        ('{"lora_config": {"r": 16, "alpha": NaN}}', "lora_config.alpha .* float32 can hold, not nan"),
        (f'{{"lora_config": {{"r": 16, "alpha": 1{"0" * 400}}}}}', "lora_config.alpha .* float32 can hold, not 1000"),
        (json.dumps({"lora_config": {"r": 8, "alpha": 8}}), r"has shape \[16, .*, this model needs \[8, "),
    ],
)
def test_a_bad_adapter_is_refused_by_name(tmp_path: Path, wrong: dict[str, object] | str, said: str) -> None:
    """wrong: tensors, or the configuration."""
    changed(tmp_path, **(wrong if isinstance(wrong, dict) else {}))
    if isinstance(wrong, str):
        (tmp_path / "bad" / "lora_config.json").write_text(wrong)
    with pytest.raises(CheckpointError, match=said):
        start(tmp_path)


def test_files_that_are_missing_or_pickled_are_refused(tmp_path: Path) -> None:
    weights = changed(tmp_path) / "bad" / "lora_weights.safetensors"
    weights.write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="cannot be read: "):
        start(tmp_path)
    weights.rename(weights.with_suffix(".ckpt"))
    with pytest.raises(CheckpointError, match=r"lora_weights.ckpt: pickled weights are not read; convert them to"):
        start(tmp_path)
    weights.with_suffix(".ckpt").unlink()
    with pytest.raises(CheckpointError, match="bad has no lora_weights"):
        start(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        start(tmp_path / "nowhere")
