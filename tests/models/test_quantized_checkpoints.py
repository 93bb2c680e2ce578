"""Quantised checkpoints as published (tests/golden/quantised): codes, weights and answers are those of the makers'
libraries."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.checkpoints.quantised import quantised
from models.checkpoints import weight_files
from models.checkpoints.quantized import QuantizedTensors
from models.checkpoints.registry import family_of, resolve
from models.interfaces.errors import CheckpointError
from models.layers.kernels import gemm
from models.layers.quantized import COLUMNS, E4M3, Codes, QuantizedLinear, QuantizedWeight
from service.hub import EMBEDDED
from tests.support.chat_golden import generate, golden_prompt, largest_difference, rounding_error
from tests.support.golden import GOLDEN, change_json, copy_checkpoint, inputs, is_chat, prompts, read_json
from tests.support.inference import no_gradients as no_gradients
from tests.support.slow import slow

CPU, META = torch.device("cpu"), torch.device("meta")
FIXTURES = GOLDEN / "quantised"
WHOLE = sorted(config.parent for config in FIXTURES.glob("*/config.json"))
LINEARS = FIXTURES / "linears"
QUICK = ("gptq_v1_desc_act", "fp8_block", "moe_ct_w4a16_g32_asym")
CASES: dict[str, Any] = read_json(LINEARS, "cases.json")


def digest(values: Tensor) -> str:
    return hashlib.sha256(values.float().contiguous().numpy().tobytes()).hexdigest()


def quantized(directory: Path, device: torch.device = CPU) -> tuple[QuantizedTensors, dict[str, Tensor]]:
    """The reader and the weights of a directory, dequantised."""

    def tensors() -> Any:
        for path in weight_files.shard_paths(directory):
            yield from ((tensor.name, tensor) for tensor in weight_files.tensors(path))

    reader = QuantizedTensors(directory, tensors(), device)
    found = {}
    for name, tensor in tensors():
        logical = reader.logical(name, tensor)
        if logical is not None and logical[1].codes is not None:
            assert device != CPU or logical[1].shape == tuple(logical[1].read().shape)
            found[logical[0]] = logical[1].read() if device == CPU else torch.empty(logical[1].shape)
    return reader, found


def codes_of(directory: Path, reader: QuantizedTensors) -> Codes:
    """Of a checkpoint with one layer."""
    for tensor in weight_files.tensors(directory / "model.safetensors"):
        logical = reader.logical(tensor.name, tensor)
        if logical is not None and logical[1].codes is not None:
            return logical[1].codes()
    raise AssertionError


def as_checkpoint(name: str, directory: Path) -> Path:
    """One of the single layers, named "layer", as a checkpoint."""
    stored = load_file(LINEARS / "linears.safetensors")
    beside = {f"{name}.y", f"{name}.y_activations"}
    tensors = {key: value for key, value in stored.items() if key.startswith(f"{name}.") and key not in beside}
    renamed = {f"layer{key.removeprefix(name)}": value for key, value in tensors.items()}
    directory.mkdir(exist_ok=True)
    save_file(renamed, directory / "model.safetensors")
    config = CASES[name]["config"]
    if "weights" in config:
        config = {**config, "config_groups": {"group_0": config}}
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    return directory


def test_every_variant_of_a_layer_is_exact(tmp_path: Path) -> None:
    """Bit by bit, and in the form that kernels read."""
    tensors = load_file(LINEARS / "linears.safetensors")
    schemes = set()
    for name, case in CASES.items():
        reader, weights = quantized(as_checkpoint(name, tmp_path / name))
        (weight,) = weights.values()
        assert list(weight.shape) == case["shape"], name
        assert digest(weight) == case["sha256_f32"], name
        x = tensors[f"x.{weight.shape[1]}"]
        torch.testing.assert_close(x @ weight.T, tensors[f"{name}.y"], atol=1e-5, rtol=1e-5)
        (of_meta,) = quantized(tmp_path / name, META)[1].values()
        assert of_meta.shape == weight.shape
        scheme = reader.scheme_of("layer.weight")
        assert scheme is not None, name
        if weight.shape[1] % 128:
            continue
        stored = QuantizedWeight(*weight.shape, scheme=scheme)
        stored.rows.fill(codes_of(tmp_path / name, reader))
        if stored.order is not None:
            order = reader.order_of("layer.weight")
            assert order is not None
            stored.order.copy_(order)
        assert torch.equal(stored.dequantised(torch.float32), weight), name
        schemes.add((scheme.codes, scheme.ordered))
    assert schemes == {("u4", False), ("u4", True), ("u8", False), ("u8", True), ("e4m3", False)}


@pytest.mark.parametrize(
    "directory", [path if path.name in QUICK else slow(path) for path in WHOLE], ids=lambda path: path.name
)
def test_a_whole_model_is_exact(directory: Path) -> None:
    """Weights bit by bit, logits, and tokens; what kernels can read is held as codes."""
    expected = load_file(directory / "expected.safetensors")
    _, weights = quantized(directory)
    published = read_json(directory, "dequantised.json")
    apart: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() == 2:
            apart[name] = weight
            continue
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for expert, matrix in enumerate(weight.mT):
            prefix = f"{name.rpartition('.')[0]}.{expert}"
            chunks = zip(parts, matrix.chunk(len(parts)), strict=True)
            apart |= {f"{prefix}.{part}.weight": chunk for part, chunk in chunks}
    assert {name: digest(value) for name, value in apart.items()} == {
        name: entry["sha256_f32"] for name, entry in published.items()
    }
    family = family_of(directory)
    model, processor = resolve(family.model)(directory, CPU, torch.float32), resolve(family.processor)(directory)
    held = [name for name, part in model.decoder.named_modules() if isinstance(part, QuantizedWeight)]
    assert len(held) >= 3
    for name in prompts(directory):
        options = {key: value for key, value in inputs(directory)["prompts"][name].items() if key == "add_vision_id"}
        prompt = golden_prompt(processor, directory, name, **options)
        assert prompt.token_ids.tolist() == expected[f"prompt.{name}.input_ids"].tolist()
        logits, steps, ids = generate(model, prompt, inputs(directory)["max_new_tokens"])
        last = expected[f"prompt.{name}.logits"]
        assert largest_difference(logits[-len(last) :], last) <= 1e-4
        assert largest_difference(steps, expected[f"prompt.{name}.generated_logits"]) <= 1e-4
        assert ids == expected[f"prompt.{name}.generated_ids"].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("directory", WHOLE, ids=lambda path: path.name)
def test_a_whole_model_on_a_gpu_is_close(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, along the expected tokens, with activations in 16 bits. The fixtures' readers of other
    libraries, which round activations or weights to 16 bits, are within 0.15; a mistake in a kernel or in the order of
    codes costs 1 and more."""
    rules = tuple(rule for rule in gemm.E4M3_RULES if rule is not gemm.eight_bit)
    monkeypatch.setattr(gemm, "E4M3_RULES", rules)
    expected = load_file(directory / "expected.safetensors")
    family, device = family_of(directory), torch.device("cuda")
    model, processor = resolve(family.model)(directory, device, torch.bfloat16), resolve(family.processor)(directory)
    for name in prompts(directory):
        options = {key: value for key, value in inputs(directory)["prompts"][name].items() if key == "add_vision_id"}
        prompt = golden_prompt(processor, directory, name, **options)
        ids = expected[f"prompt.{name}.generated_ids"].tolist()
        logits, steps, _ = generate(model, prompt, len(ids), forced=ids)
        last = expected[f"prompt.{name}.logits"]
        assert largest_difference(logits[-len(last) :].cpu(), last) <= 0.2
        assert largest_difference(steps.cpu(), expected[f"prompt.{name}.generated_logits"]) <= 0.2


@pytest.mark.parametrize("directory", WHOLE, ids=lambda path: path.name)
def test_headers_tell_what_is_held(directory: Path) -> None:
    """A dry run counts the bytes of a start; random weights are held like the file's."""
    load = resolve(family_of(directory).model)
    real, dry, random = (
        {name: (value.shape, value.dtype) for name, value in made.decoder.named_parameters()}
        for made in (
            load(directory, CPU, torch.float32),
            load(directory, META, torch.float32),
            load(directory, CPU, torch.float32, "random"),
        )
    )
    assert real == dry
    assert {name: shape for name, (shape, _) in real.items()} == {name: shape for name, (shape, _) in random.items()}


def test_the_last_group_may_be_shorter(tmp_path: Path) -> None:
    """192 inputs in groups of 128, with g_idx and without."""
    made = quantised(EMBEDDED / "qwen2_vl", tmp_path / "made", "gptq")
    _, expected = quantized(made)
    tensors = load_file(made / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if not key.endswith(".g_idx")}
    save_file(kept, made / "model.safetensors")
    _, found = quantized(made)
    assert len(kept) < len(tensors) and found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


Q_PROJ, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
IN_FP8 = {NORM: torch.ones(256, dtype=E4M3), f"{NORM}_scale_inv": torch.ones(1, 2)}
DAMAGED: list[tuple[str, str, dict[str, Tensor] | None, str]] = [
    ("awq", ".qzeros", None, "missing tensor: {}"),
    ("moe_ct_w4a16_g32_asym", ".weight_zero_point", None, "missing tensor: {}"),
    ("gptq_v1_desc_act", ".scales", None, "missing tensor: {}"),
    ("ct_w4a16_g32_asym", ".weight_packed", None, r"unexpected tensors: .*weight_scale"),
    ("ct_fp8_dynamic", ".weight_scale", None, "missing tensor: {}"),
    ("fp8_block", "_scale_inv", None, "missing tensor: {}"),
    ("fp8_block", f"{Q_PROJ}_scale_inv", {f"{Q_PROJ}_scale_inv": torch.ones(3, 2)}, r"{} has shape \(3, 2\), expected"),
    ("fp8_block", "model.other_scale_inv", {"model.other_scale_inv": torch.ones(1, 1)}, "unexpected tensors: {}"),
    ("fp8_block", NORM, IN_FP8, r"{} has shape \(256,\); in FP8 only matrices"),
]
"""Fixture, end of the name of the tensor that is named, what is written (None: that tensor is lost), message."""


@pytest.mark.parametrize(("name", "suffix", "written", "message"), DAMAGED)
def test_what_does_not_fit_is_named(
    tmp_path: Path, name: str, suffix: str, written: dict[str, Tensor] | None, message: str
) -> None:
    directory = copy_checkpoint(FIXTURES / name, tmp_path / "damaged")
    tensors = load_file(directory / "model.safetensors") | (written or {})
    named = next(key for key in sorted(tensors) if key.endswith(suffix))
    if written is None:
        del tensors[named]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=message.format(named.replace(".", r"\."))):
        loaded(directory)


def test_codes_of_other_blocks_or_of_no_method_are_refused(tmp_path: Path) -> None:
    directory = copy_checkpoint(FIXTURES / "fp8_block", tmp_path / "fp8")
    config = read_json(directory, "config.json")["quantization_config"]
    for given, message in (
        (config | {"weight_block_size": [64, 128]}, r"_scale_inv has shape \(2, 2\), expected \(4, 2\)"),
        (None, "F8_E4M3"),
    ):
        change_json(directory / "config.json", {"quantization_config": given})
        with pytest.raises(CheckpointError, match=message):
            loaded(directory)


def test_damaged_values_are_named(tmp_path: Path) -> None:
    """NaN in codes and in factors, and a bias that is not zero where the model has none."""
    for name, key, value in (
        ("fp8_block", "model.layers.0.self_attn.q_proj.weight", 0xFF),
        ("ct_w4a16_g32_asym", "model.layers.1.mlp.up_proj.weight_scale", float("nan")),
        ("gptq_v1_desc_act", "model.layers.0.mlp.up_proj.bias", 1.0),
    ):
        directory = copy_checkpoint(FIXTURES / name, tmp_path / name)
        tensors = load_file(directory / "model.safetensors")
        values = tensors[key].view(torch.uint8) if value == 0xFF else tensors[key]
        values.view(-1)[5] = value
        save_file(tensors, directory / "model.safetensors")
        weight = key.rpartition(".")[0].replace(".", r"\.")
        with pytest.raises(CheckpointError, match=f"(NaN or infinite values in|unexpected) tensors: {weight}"):
            resolve(family_of(directory).model)(directory, CPU, torch.float32)


QUICK_CHAT = ("qwen2_vl", "qwen3_vl_moe")
EMBEDDED_CHAT = Path(__file__).parents[2] / "models/embedded/qwen2_vl"
CHAT = [
    EMBEDDED_CHAT,
    *(folder for config in sorted(GOLDEN.glob("*/config.json")) if is_chat(family_of(folder := config.parent))),
]


REFERENCE_FACTOR = 1.5


def loaded(directory: Path, device: torch.device = CPU, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return resolve(family_of(directory).model)(directory, device, dtype, "published", **options)


@pytest.mark.parametrize(
    "directory", [path if path.name in QUICK_CHAT else slow(path) for path in CHAT], ids=lambda path: path.name
)
def test_all_but_what_is_named_is_made_from_the_published_weights(directory: Path) -> None:
    plain, quantised = loaded(directory), loaded(directory, quantization="fp8")
    stored = {name: part for name, part in quantised.decoder.named_modules() if isinstance(part, QuantizedWeight)}
    assert stored
    for name, part in stored.items():
        published = plain.decoder.get_parameter("embed_tokens.weight" if name == "tied_head" else name).double()
        allowed = torch.maximum(published.abs() / 16, part.scale.double() * 2**-10) * (1 + 2**-20)
        assert ((part.dequantised(torch.float64) - published).abs() <= allowed).all(), name
        assert part.values.dtype == E4M3 and part.scale.dtype == torch.float32
    left = [
        name
        for name, part in quantised.decoder.named_modules()
        if isinstance(part, nn.Linear) and not isinstance(part, QuantizedLinear)
    ]
    odd = quantised.decoder.embed_tokens.weight.shape[0] % COLUMNS
    narrow = ("kv_up", "in_ba", "shared_gate")
    assert all(name.endswith(narrow) or (name == "head" and odd) for name in left), left
    assert not any(isinstance(part, QuantizedWeight) for part in quantised.encoder.modules())
    same = dict(plain.named_parameters())
    for name, parameter in quantised.named_parameters():
        if name in same:
            assert torch.equal(parameter, same[name]), name


def with_all_experts(directory: Path, parent: Path) -> Path:
    """The same checkpoint, whose router takes all experts of a mixture: if it chose some, rounding could choose others,
    and the logits of most tokens would be about the choice."""
    config = read_json(directory, "config.json")
    text = config.get("text_config", config)
    experts = text.get("num_experts", text.get("n_routed_experts"))
    if experts is None:
        return directory
    for file in directory.iterdir():
        (parent / file.name).symlink_to(file)
    (parent / "config.json").unlink()
    text["num_experts_per_tok"] = experts
    (parent / "config.json").write_text(json.dumps(config))
    return parent


@pytest.mark.gpu
@pytest.mark.parametrize("directory", CHAT[1:], ids=lambda path: path.name)
def test_on_a_gpu_logits_are_as_close_as_their_reference(directory: Path, tmp_path: Path) -> None:
    """To the same e4m3 weights in float32: the prompt's logits, and those of the tokens that these choose. The
    reference rounds to bfloat16, or also activations of more than 64 rows to e4m3, whichever costs more."""
    from benchmarks.quantization import eight_bit_prefills  # which imports the trainings

    directory = with_all_experts(directory, tmp_path)
    processor = resolve(family_of(directory).processor)(directory)
    prompt, limit = golden_prompt(processor, directory, prompts(directory)[0]), inputs(directory)["max_new_tokens"]
    model = loaded(directory, quantization="fp8")
    *exact, ids = generate(model, prompt, limit)

    def errors(device: torch.device) -> list[float]:
        made = generate(loaded(directory, device, torch.bfloat16, quantization="fp8"), prompt, limit, forced=ids)
        return [rounding_error(mine.cpu(), wanted) for mine, wanted in zip(made[:2], exact, strict=True)]

    host = errors(CPU)
    with eight_bit_prefills():
        host = [max(pair) for pair in zip(host, errors(CPU), strict=True)]
    for part, ours, plain in zip(("prompt", "steps"), errors(torch.device("cuda")), host, strict=True):
        assert ours <= REFERENCE_FACTOR * plain, part
