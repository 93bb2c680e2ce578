"""What a start would use of a GPU, told without one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open as real_safe_open
from typer.testing import CliRunner

from benchmarks.checkpoints.published import make
from benchmarks.report.formatting import NAMES
from models.checkpoints.registry import family_of, resolve
from service.cli.main import app
from service.engine import memory
from service.engine.chat.worker import ChatWorker
from service.engine.core.worker import MemoryRequirements
from service.engine.dry_run import CONTEXT_BYTES, dry_run
from service.engine.memory import LiveBytes, MemoryPlanError, peak_bytes, state_bytes
from service.engine.speech.worker import SpeechWorker
from service.hub.catalog import embedded_models
from service.link.config import ConfigurationError, EngineConfig, ModelConfig
from tests.support.lora import random_adapter, write_adapter
from tests.support.slow import slow

GIB = 1 << 30
GOLDEN = Path(__file__).parents[1] / "golden"
DIRECTORIES = [*map(Path, embedded_models()), *sorted(path.parent for path in GOLDEN.glob("*/config.json"))]


def config(directory: Path, load_format: str = "published", **settings: Any) -> EngineConfig:
    return EngineConfig((ModelConfig("m", str(directory), load_format=load_format),), **settings)  # type: ignore[arg-type]


def _documented(model: str, page: str = "operation.md") -> list[float]:
    """The first number of each cell in the model's first row of a page of docs/."""
    page = (GOLDEN.parents[1] / "docs" / page).read_text()
    row, *_ = [line for line in page.splitlines() if line.startswith(f"| {model} |")]
    cells = [re.match(r"[\d.,]+\d", cell.strip()) for cell in row.strip("| ").split("|")[1:]]
    return [float(cell[0].replace(",", "")) for cell in cells if cell is not None]


class _Unread:
    """An open file of weights that gives out headers and no values."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._file = real_safe_open(*arguments, **options)

    def __enter__(self) -> _Unread:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(name)

    def get_tensor(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")


@pytest.mark.parametrize(
    "directory",
    [path if path == DIRECTORIES[0] else slow(path) for path in DIRECTORIES],
    ids=lambda path: f"{path.parent.name}-{path.name}",
)
def test_every_family_is_sized_by_config_and_headers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.checkpoints.weight_files.safe_open", _Unread)
    found = dry_run(config(directory), 24 * GIB)
    monkeypatch.undo()
    family = family_of(directory)
    model = resolve(family.model)(directory, torch.device("cpu"), torch.bfloat16, "published")
    modules = [part for part in (model, *vars(model).values()) if isinstance(part, torch.nn.Module)]
    parts = modules[:1] if isinstance(model, torch.nn.Module) else modules
    tensors = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
    (hosted,) = found.models
    weights = sum(tensor.untyped_storage().nbytes() for tensor in {id(t): t for t in tensors}.values())
    assert hosted.weights == pytest.approx(weights, rel=0.02)
    assert found.memory.used == hosted.weights + CONTEXT_BYTES
    assert found.memory.workspace > 0 and found.refusal is None
    assert hosted.positions > 0 and 1 <= hosted.at_once(1024) <= hosted.running


@pytest.mark.slow
def test_a_published_chat_model_on_small_and_large_gpus(tmp_path: Path) -> None:
    """2,208,985,600 parameters; 28 layers of 2 heads of 128 keys and values, 28,672 bytes a position."""
    directory = make("qwen2_vl_2b", tmp_path)
    small = dry_run(config(directory, "random"), 24 * GIB)
    (hosted,) = small.models
    assert 2 * 2_208_985_600 <= hosted.weights < 2 * 2_208_985_600 + (1 << 20)
    assert hosted.context == 32768
    assert hosted.positions == pytest.approx(small.memory.left / 28_672, abs=32)
    # The largest pass is the encoder's, over 16,384 patches: several times its input and never the square of it.
    assert 0.2 * GIB < small.memory.workspace < 1.5 * GIB
    assert (hosted.at_once(1024), hosted.at_once(32768)) == (64, hosted.positions // 32768)
    text = "\n".join(small.lines())
    assert "GPU of 24.0 GiB" in text and "4.11 GiB" in text and f"a KV cache of {hosted.positions} positions" in text
    assert _documented("Qwen2-VL-2B") == pytest.approx([4.1, hosted.context, *positions_by_card(directory)], rel=0.05)
    tight = dry_run(config(directory, "random"), 6 * GIB)
    assert tight.refusal is not None and "model 'm' gets 0 pages" in tight.refusal and "graph_memory" in tight.refusal
    assert "weights" in "\n".join(tight.lines()) and "KV cache of" not in "\n".join(tight.lines())


def positions_by_card(directory: Path) -> list[int]:
    """Of a model's KV cache on cards of 8, 12, 16, 24 and 80 GB, by what these give to programs."""
    found = (dry_run(config(directory, "random"), round(gib * GIB)) for gib in (7.8, 11.7, 15.7, 23.6, 79.2))
    return [one.models[0].positions for one in found if one.refusal is None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form", "label"),
    [("qwen2_vl_7b", "awq", "4 bits"), ("qwen2_5_vl_3b", "awq", "4 bits"), ("qwen3_vl_30b_a3b", "fp8", "FP8")],
)
def test_the_documented_cards_of_quantised_checkpoints(name: str, form: str, label: str, tmp_path: Path) -> None:
    directory = make(name, tmp_path, form)
    assert _documented(f"{NAMES[name]}, {label}") == positions_by_card(directory)


def linear_bytes(width: int, inner: int, qkv: int, layers: int, vocabulary: int) -> int:
    """What e4m3 saves of a decoder with a tied head beside bfloat16: a byte of each weight; less the factors, of 4
    bytes an output, and the head's copy."""
    weights = layers * width * (qkv + width + 3 * inner)
    outputs = layers * (qkv + width + 2 * inner + width) + vocabulary
    return weights - 4 * outputs - vocabulary * width


def test_weights_in_e4m3_are_counted(tmp_path: Path) -> None:
    copies = 28 * 2 * 8960 * 1536  # of `down` in 16 bits
    for directory, saved in (
        (DIRECTORIES[0], linear_bytes(192, 512, 320, 6, 1152)),
        (make("qwen2_vl_2b", tmp_path), linear_bytes(1536, 8960, 2048, 28, 151_936) - copies),
    ):
        plain, quantised = (weights_of(directory, quantization) for quantization in ("none", "fp8"))
        assert plain - quantised == saved


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("voxcpm2", "qwen3_asr"))])
def test_the_documented_weights_in_fewer_bits(name: str, tmp_path: Path) -> None:
    published = [make(name, tmp_path, form) for form in (None, "fp8", "awq")]
    forms = [
        (published[0], "none"),
        (published[0], "fp8"),
        *((at, "none") for at in published[1:]),
        (published[2], "fp8"),
    ]
    found = [round(weights_of(directory, quantization) / GIB, 2) for directory, quantization in forms]
    assert _documented(NAMES[name], "quantization.md") == found


def test_a_speech_model_is_not_quantised() -> None:
    directory = next(path for path in DIRECTORIES if family_of(path).kind == "speech")
    wanted = EngineConfig((ModelConfig("voice", str(directory), quantization="fp8"),))
    with pytest.raises(ConfigurationError, match="quantization: voice is a speech model"):
        dry_run(wanted, 24 * GIB)


def weights_of(directory: Path, quantization: str) -> int:
    """As `dry_run` counts them, without the passes."""
    with LiveBytes() as counted:
        model = resolve(family_of(directory).model)(
            directory, torch.device("meta"), torch.bfloat16, "random", quantization
        )
    assert model.decoder is not None
    return counted.live


def measured_once(monkeypatch: pytest.MonkeyPatch, worker: type, key: Callable[[Any], Hashable]) -> None:
    """Workers of this class with the same key are measured once."""
    measure, measured = worker.measure, dict[Hashable, MemoryRequirements]()

    def once(one: Any) -> MemoryRequirements:
        if key(one) not in measured:
            measured[key(one)] = measure(one)
        return measured[key(one)]

    monkeypatch.setattr(worker, "measure", once)


@pytest.mark.slow
def test_a_published_speech_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,290,004,544 parameters in bfloat16, and a codec of 94 million in float32."""
    # The number of slots alone changes the passes with the size of the GPU.
    measured_once(monkeypatch, SpeechWorker, lambda worker: worker._context.config.slots)
    directory = make("voxcpm2", tmp_path)
    found = dry_run(config(directory, "random"), 24 * GIB)
    (hosted,) = found.models
    assert hosted.weights == pytest.approx(2 * 2_290_004_544 + 4 * 94_213_957, rel=0.005)
    assert hosted.context == 8192 and hosted.at_once(1024) == 64
    assert _documented("VoxCPM2") == pytest.approx([4.6, hosted.context, *positions_by_card(directory)], rel=0.05)
    assert 0.1 * GIB < found.memory.workspace < 2 * GIB


@pytest.mark.slow
def test_slots_of_adapters_are_counted(tmp_path: Path) -> None:
    directory = next(path for path in DIRECTORIES if family_of(path).kind == "speech")
    for seed in range(3):
        write_adapter(tmp_path / f"{seed}", random_adapter(directory, 24, seed, ("lm",)), 24, 24.0)
    without = dry_run(config(directory), 24 * GIB).memory.state
    tensors = random_adapter(directory, 32, 0, ("lm",)).values()  # ranks are filled up to a power of two
    found = dry_run(config(directory, lora_voices=str(tmp_path)), 24 * GIB)
    bytes_of_one = 2 * sum(tensor.numel() for tensor in tensors)
    assert found.memory.state - without == pytest.approx(3 * bytes_of_one, rel=0.02)


def test_graph_memory_that_no_start_would_get_by_with(tmp_path: Path) -> None:
    with pytest.raises(MemoryPlanError, match="at most 1024 allowed"):
        dry_run(config(DIRECTORIES[0], graph_memory=1024), 24 * GIB)


def test_bytes_are_counted_as_long_as_they_are_held() -> None:
    meta = torch.device("meta")
    weight = torch.empty(1000, 1000, device=meta)

    def run() -> None:
        a = weight.t() @ weight  # 4 MB
        b = a + 1  # 8 MB
        del a
        c = b[:10].view(-1) * 2  # a view, and 40 KB
        del b, c
        torch.empty(500, 500, device=meta)

    for _ in range(2):  # the second time the forms of results are remembered
        assert peak_bytes(run, meta) == 8_000_000


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", "--dry-run", *arguments], env={"COLUMNS": "200"})


@pytest.mark.slow
def test_the_command_prints_what_fits_and_names_what_does_not(tmp_path: Path) -> None:
    small = str(GOLDEN / "qwen2_vl")
    done = _run("--gpu-memory", "24GiB", "--gpus", "0,2")
    assert done.exit_code == 0 and "on each GPU of 24.0 GiB" in done.output, done.output
    assert "reprise/qwen2_vl: a KV cache of" in done.output and "reprise/voxcpm2: a KV cache of" in done.output
    done = _run("--gpu-memory", "1G", "--model", small)
    assert done.exit_code == 2 and "left for KV caches" in done.stdout and "raise memory_share" in done.stderr
    done = _run("--gpu-memory", "much")
    assert done.exit_code == 2 and "gpu_memory: must be a number of bytes" in done.stderr
    done = _run("--gpu-memory", "24")
    assert done.exit_code == 2 and "gpu_memory: 24 is less than 1G; 24G is a GPU of 24 GiB" in done.stderr
    damaged = tmp_path / "damaged"
    shutil.copytree(GOLDEN / "qwen2_vl", damaged)
    published = json.loads((damaged / "config.json").read_text())
    published["intermediate_size"] = 2 * published["intermediate_size"]
    (damaged / "config.json").write_text(json.dumps(published))
    done = _run("--gpu-memory", "24G", "--model", str(damaged))
    assert done.exit_code == 2 and "has shape" in done.stderr, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_size_is_asked_for() -> None:
    done = _run()
    assert done.exit_code == 2 and "name the size of one, as in --gpu-memory 24G" in done.stderr


@pytest.mark.slow
def test_recurrent_states_are_part_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows for each slot at least; where these take more than their share, slots are fewer."""
    assert state_bytes(EngineConfig((), gpu_bytes=80 * GIB), 52 * GIB) == int(0.4 * (0.9 * 80 - 52) * GIB)
    measured_once(monkeypatch, ChatWorker, lambda worker: None)
    for share, slots in ((0.4, EngineConfig(()).slots), (0.0, 1)):
        monkeypatch.setattr(memory, "STATE_SHARE", share)
        plan = dry_run(config(GOLDEN / "qwen3_5", graphs=False, max_step_tokens=128), 8 * GIB)
        (model,) = plan.models
        assert model.running == slots <= model.snapshots and 0 < model.states <= plan.memory.state
        (line,) = [line for line in plan.lines() if "recurrent states" in line]
        assert f"{slots} requests at once and at least {model.snapshots} prefixes" in line
