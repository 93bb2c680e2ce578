"""Strict loading of safetensors: what is filled, and errors that name the tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models.checkpoints import checkpoint, weight_files
from models.checkpoints.checkpoint import Source, load_parameters, without_memory
from models.checkpoints.published import read_config, sampling_defaults, stop_token_ids
from models.checkpoints.tied_head import with_the_files_head
from models.interfaces.errors import CheckpointError
from models.interfaces.rule import Rule
from models.layers.block import BlockConfig
from models.layers.decoder import DecoderConfig

EMBEDDED = Path(__file__).parents[2] / "models" / "embedded"
RULES = [
    Rule("net.{i}.q.weight", "blocks.{i}.qk.weight", rows=(0, 2)),
    Rule("net.{i}.k.weight", "blocks.{i}.qk.weight", rows=(2, 5)),
    Rule("experts.{e}.w", "experts"),
    Rule("conv.weight", "patch.weight", shape=(2, 3, 2, 2)),
    Rule("extra.{rest}", "norm.{rest}"),
]
ALIASES = (("model.net.", "net."),)


class Net(nn.Module):
    float32_parameters = frozenset({"experts"})

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"qk": nn.Linear(4, 5, bias=False)}) for _ in range(2))
        self.experts = nn.Parameter(torch.empty(3, 2, 4))
        self.patch = nn.Linear(12, 2, bias=False)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("table", torch.arange(3.0, device="cpu"), persistent=False)


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        **{f"net.{i}.q.weight": (2, 4) for i in range(2)},
        **{f"net.{i}.k.weight": (3, 4) for i in range(2)},
        **{f"experts.{e}.w": (2, 4) for e in range(3)},
        "conv.weight": (2, 3, 2, 2),
        "extra.weight": (4,),
        "extra.bias": (4,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def load(directory: Path, dtype: torch.dtype = torch.float32, **kwargs: object) -> Net:
    with torch.device("meta"):
        net = Net()
    load_parameters(net, directory, RULES, device=torch.device("cpu"), dtype=dtype, aliases=ALIASES, **kwargs)
    return net


def write_shards(directory: Path, values: dict[str, Tensor], *, index: bool) -> None:
    names = sorted(values)
    files = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for file, part in files.items():
        save_file({name: values[name] for name in part}, directory / file)
    if index:
        weight_map = {name: file for file, part in files.items() for name in part}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def check(net: Net, values: dict[str, Tensor]) -> None:
    for i in range(2):
        expected = torch.cat((values[f"net.{i}.q.weight"], values[f"net.{i}.k.weight"]))
        assert torch.equal(net.blocks[i]["qk"].weight, expected)
    assert torch.equal(net.experts, torch.stack([values[f"experts.{e}.w"] for e in range(3)]))
    assert torch.equal(net.patch.weight, values["conv.weight"].flatten(1))
    assert torch.equal(net.norm.bias, values["extra.bias"])


@pytest.mark.parametrize("layout", ["single", "index", "glob"])
def test_loads_single_and_sharded_files(tmp_path: Path, layout: str) -> None:
    values = tensors()
    if layout == "single":
        save_file(values, tmp_path / "model.safetensors")
    else:
        write_shards(tmp_path, values, index=layout == "index")
    check(load(tmp_path), values)


def test_dtype_buffers_and_parameters_that_stay_float32(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    net = load(tmp_path, torch.bfloat16)
    assert net.patch.weight.dtype == torch.bfloat16 and not net.patch.weight.requires_grad
    assert net.experts.dtype == torch.float32
    assert torch.equal(net.table, torch.tensor([0.0, 1.0, 2.0]))


def test_aliased_names_load_and_ignored_tensors_are_skipped(tmp_path: Path) -> None:
    values = tensors()
    renamed = {f"model.{name}" if name.startswith("net.") else name: value for name, value in values.items()}
    save_file({**renamed, "old.3.inv_freq": torch.ones(2)}, tmp_path / "model.safetensors")
    check(load(tmp_path, ignore=["old.{i}.inv_freq"]), values)


NOT_A_NUMBER = torch.ones(4)
NOT_A_NUMBER.view(torch.int32)[2] = -1
INFINITE = torch.ones(2, 4)
INFINITE[0, 3] = torch.inf


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        # As zeros or ones of bits in a file do.
        (
            {"extra.weight": NOT_A_NUMBER, "experts.1.w": INFINITE},
            "NaN or infinite values in tensors: experts.1.w, extra.weight$",
        ),
        ({"net.1.k.weight": None}, "missing tensors: net.1.k.weight"),
        ({"net.2.k.weight": torch.ones(3, 4)}, "unexpected tensors: net.2.k.weight"),
        ({"conv.weight": torch.ones(2, 12)}, r"conv.weight has shape \(2, 12\), expected \(2, 3, 2, 2\)"),
        ({"model.net.0.q.weight": torch.ones(2, 4)}, "net.0.q.weight.* repeats|repeats .*net.0.q.weight"),
        ({"extra.bias": torch.ones(4, dtype=torch.int8)}, "extra.bias has dtype I8"),
    ],
)
def test_errors_name_the_tensor(tmp_path: Path, changed: dict[str, Tensor | None], message: str) -> None:
    values = {name: value for name, value in (tensors() | changed).items() if value is not None}
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    values = tensors()
    write_shards(tmp_path, values, index=False)
    save_file({"conv.weight": values["conv.weight"]}, tmp_path / "c.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor conv\.weight repeats conv\.weight of"):
        load(tmp_path)


def test_an_index_of_files_that_are_none_of_the_checkpoints_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, tensors(), index=True)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**weight_map, "conv.weight": "../a.safetensors"}}))
    with pytest.raises(CheckpointError, match="not a file of the checkpoint"):
        load(tmp_path)


def test_missing_and_broken_safetensors_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    save_file({"decoder.bias": torch.zeros(1)}, tmp_path / "audiovae.safetensors")  # a codec, and no weights of a model
    with pytest.raises(CheckpointError, match=r"no safetensors file \(model\.safetensors\)"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + b"\x00" * 7 + b"{broken}")
    for read in (load, loaded):
        with pytest.raises(CheckpointError, match=f"^{tmp_path}/model.safetensors cannot be read"):
            read(tmp_path)


def test_weights_larger_than_what_a_gpu_has_left_are_refused_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """122 B of parameters, without a GPU and without files: nothing may be allocated or opened."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 8 << 30))
    with without_memory():
        net = nn.Linear(1 << 17, 930_000, bias=False)
    with pytest.raises(
        CheckpointError, match=r"^weights of 227\.1 GiB do not fit: 3\.0 of the GPU's 8\.0 GiB are free$"
    ):
        load_parameters(net, tmp_path, [], device=torch.device("cuda"), dtype=torch.bfloat16, load_format="random")


def resident(kind: str) -> int:
    """Bytes of this process: RssAnon or RssFile."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return 1024 * int(line.split()[1])


@pytest.mark.slow
def test_host_memory_over_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the parameters (here on the host as well) there is one tensor, and the pages of one mapped shard."""
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(12)))
    for shard in range(4):
        layers = range(3 * shard, 3 * shard + 3)
        values = {f"{layer}.weight": torch.full((4096, 2048), 0.5, dtype=torch.bfloat16) for layer in layers}
        save_file(values, tmp_path / f"{shard}.safetensors")
    del values
    tensor, slack = 2 * 4096 * 2048, 24 << 20
    before = {kind: resident(kind) for kind in ("RssAnon", "RssFile")}
    peak, fill = dict(before), checkpoint._fill

    def watched(place: checkpoint._Place, tensor: weight_files.PublishedTensor) -> None:
        fill(place, tensor)
        for kind in peak:
            peak[kind] = max(peak[kind], resident(kind))

    monkeypatch.setattr(checkpoint, "_fill", watched)
    rules = [Rule("{i}.weight", "{i}.weight")]
    load_parameters(net, tmp_path, rules, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert peak["RssAnon"] - before["RssAnon"] <= 12 * tensor + tensor + slack
    assert peak["RssFile"] - before["RssFile"] <= 3 * tensor + slack < 12 * tensor


def test_rules_must_fill_every_parameter(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = Net()
    rules = [rule for rule in RULES if "q.weight" not in rule.published]
    with pytest.raises(CheckpointError, match=r"blocks.0.qk.weight: rules fill 12 of 20"):
        load_parameters(net, tmp_path, rules, device=torch.device("cpu"), dtype=torch.float32)


def test_adapters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_config(tmp_path) == {}
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read_config(tmp_path)


def test_what_a_generation_config_says_of_sampling() -> None:
    published = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    assert sampling_defaults({**published, "do_sample": True, "eos_token_id": 2}) == published
    assert sampling_defaults(published) == published
    assert sampling_defaults({"do_sample": False, "top_k": 5, "top_p": None}) == {"top_k": 5, "temperature": 0.0}
    assert sampling_defaults({}) == {}


@pytest.mark.slow
def test_a_model_is_built_without_initial_values_and_without_the_compiler() -> None:
    program = f"""
import sys
from pathlib import Path
import torch
from models.checkpoints.registry import family_of, resolve
for name in ("qwen2_vl", "voxcpm2"):
    directory = Path({str(EMBEDDED)!r}) / name
    resolve(family_of(directory).model)(directory, torch.device("cpu"), torch.float32, "published")
sys.exit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    with without_memory():
        layer = nn.Embedding(3, 2)
    assert layer.weight.is_meta and nn.Embedding(3, 2).weight.any()


@pytest.mark.parametrize(
    ("generation", "default", "expected"),
    [
        ({}, None, set()),
        ({}, 5, {5}),
        ({}, [5, 6], {5, 6}),
        ({"eos_token_id": 7}, 5, {7}),
        ({"eos_token_id": [7, 8]}, 5, {7, 8}),
        ({"eos_token_id": None}, 5, {5}),
        ({"eos_token_id": None}, None, set()),
    ],
)
def test_an_answer_ends_at_the_eos_ids_of_the_file_and_at_named_special_tokens(
    generation: dict[str, Any], default: Any, expected: set[int]
) -> None:
    assert stop_token_ids(generation, {}, (), default) == expected
    assert stop_token_ids(generation, {"<end>": 9}, ("<end>", "<other>"), default) == expected | {9}


BLOCK = BlockConfig(hidden_size=8, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=4, norm_eps=1e-6)
TIED = DecoderConfig(vocab_size=6000, num_layers=1, block=BLOCK, max_positions=16, rope_theta=1e4, tied=True)
TABLE = torch.randn(6000, 8)
NAMES = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")


def loaded(directory: Path, decoder: DecoderConfig = TIED, device: str = "cpu") -> bool:
    return with_the_files_head(decoder, Source(directory, torch.device(device), torch.float32)).tied


@pytest.mark.parametrize("name", NAMES)
def test_a_head_of_other_values_is_not_tied(tmp_path: Path, name: str) -> None:
    """As transformers 5 decides it. The difference is in the last row, and in another file."""
    save_file({name: TABLE}, tmp_path / "a.safetensors")
    assert loaded(tmp_path)
    save_file({"lm_head.weight": TABLE.clone()}, tmp_path / "b.safetensors")
    assert loaded(tmp_path)
    other = TABLE.clone()
    other[-1, -1] += 1
    save_file({"lm_head.weight": other}, tmp_path / "b.safetensors")
    assert not loaded(tmp_path)
    assert loaded(tmp_path, device="meta")
    assert with_the_files_head(TIED, Source(tmp_path, torch.device("cpu"), torch.float32, "random")).tied
    assert not loaded(tmp_path, replace(TIED, tied=False))


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, True), (torch.float8_e4m3fn, False)])
def test_a_head_in_another_dtype_is_compared_by_its_values(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    table = TABLE.bfloat16()
    save_file({NAMES[0]: table, "lm_head.weight": table.to(dtype)}, tmp_path / "model.safetensors")
    assert loaded(tmp_path) == tied
