"""Strict loading of VoxCPM2: networks, codec, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import models
from models.interfaces.errors import CheckpointError, InputError
from models.voxcpm2.audio_vae import AudioVAE
from models.voxcpm2.config import load_config
from models.voxcpm2.model import load_model
from models.voxcpm2.processor import load_processor
from models.voxcpm2.stack import longrope_table
from models.voxcpm2.vae_weights import load_audio_vae
from tests.models.voxcpm2.golden import DIRECTORY, expected, processor

CPU = torch.device("cpu")
EMBEDDED = Path(models.__file__).parent / "embedded" / "voxcpm2"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the golden checkpoint that a test may change."""
    for path in DIRECTORY.iterdir():
        if path.suffix in (".json", ".safetensors", ".pth") and path.stem != "expected":
            shutil.copy(path, tmp_path)
    return tmp_path


def codec_tensors(checkpoint: Path) -> dict[str, Tensor]:
    return torch.load(checkpoint / "audiovae.pth", weights_only=True)["state_dict"]


def load_codec(checkpoint: Path, sample_rate: int) -> AudioVAE:
    config = replace(load_config(checkpoint).vae, out_sample_rate=sample_rate)
    vae = AudioVAE(config).requires_grad_(False)
    load_audio_vae(vae, checkpoint, config)
    return vae


def test_weights_lie_in_memory_as_their_gemms_read_them() -> None:
    """Transposed convolutions with the input channels innermost, linear layers of a CPU with the outputs."""
    model = load_model(DIRECTORY, torch.device("cpu"), torch.float32)
    assert all(block.up.weight.stride(0) == 1 for block in model.vae.decoder.blocks)
    shapes = load_model(DIRECTORY, torch.device("meta"), torch.float32)
    for ours, others in zip(model.network.modules(), shapes.network.modules(), strict=True):
        if isinstance(ours, nn.Linear):
            assert (ours.weight.stride(0), others.weight.stride(1)) == (1, 1)


def test_other_output_bandwidth() -> None:
    audio = load_codec(DIRECTORY, 24000).decoder(expected()["vae.decode.z"][..., :4])
    torch.testing.assert_close(audio, expected()["vae.decode.audio_sr24000"], atol=2e-4, rtol=0)


def test_the_codec_may_be_in_safetensors(checkpoint: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in codec_tensors(checkpoint).items()}
    save_file(tensors, checkpoint / "audiovae.safetensors")
    (checkpoint / "audiovae.pth").unlink()
    audio = load_codec(checkpoint, 48000).decoder(expected()["vae.decode.z"])
    torch.testing.assert_close(audio, expected()["vae.decode.audio"], atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("file", "name", "change", "message"),
    [
        ("audiovae.pth", "decoder.model.9.weight_g", None, "missing tensor decoder.model.9.weight_g"),
        ("audiovae.pth", "encoder.block.2.block.3.alpha", torch.ones(1, 7, 1), "block.2.block.3.alpha has shape"),
        ("audiovae.pth", "decoder.model.10.alpha", torch.ones(1), "unexpected tensors: decoder.model.10.alpha"),
        ("audiovae.pth", "decoder.sr_bin_boundaries", torch.tensor([1, 2, 3], dtype=torch.int32), "sr_bin_boundaries"),
        ("audiovae.pth", "weight", Path("code"), "audiovae.pth cannot be read"),
        ("model.safetensors", "stop_head.weight", None, "stop_head.weight"),
    ],
)
def test_codec_and_network_load_strictly(checkpoint: Path, file: str, name: str, change: Any, message: str) -> None:
    codec = file == "audiovae.pth"
    tensors = codec_tensors(checkpoint) if codec else load_file(checkpoint / file)
    changed = {key: value for key, value in (tensors | {name: change}).items() if value is not None}
    if codec:
        torch.save({"state_dict": changed}, checkpoint / file)
    else:
        save_file(changed, checkpoint / file)
    with pytest.raises(CheckpointError, match=message):
        load_model(checkpoint, CPU, torch.float32)


def test_needs_a_codec(checkpoint: Path) -> None:
    (checkpoint / "audiovae.pth").unlink()
    with pytest.raises(CheckpointError, match=r"neither audiovae\.safetensors nor audiovae\.pth"):
        load_model(checkpoint, CPU, torch.float32)


@pytest.mark.parametrize(("length", "scale"), [(32768, 1.0), (512, (9 / 15) ** 0.5), (2**20, (20 / 15) ** 0.5)])
def test_rotary_tables_of_other_lengths_are_scaled(checkpoint: Path, length: int, scale: float) -> None:
    """By sqrt(1 + ln(length / original) / ln(original)), which is below 1 for the shorter ones of small checkpoints."""
    config = json.loads((checkpoint / "config.json").read_text())
    config["lm_config"]["max_position_embeddings"] = length
    config["lm_config"]["rope_scaling"]["original_max_position_embeddings"] = 32768
    (checkpoint / "config.json").write_text(json.dumps(config))
    cos, sin = longrope_table(load_config(checkpoint).lm, 4, torch.float32)
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full_like(cos, scale))


def test_the_scores_are_those_of_the_embedded_checkpoint() -> None:
    scores = json.loads((EMBEDDED.parent / "gates_voxcpm2.json").read_text())
    for name in ("model.safetensors", "audiovae.safetensors"):
        assert scores["sha256"][name] == hashlib.sha256((EMBEDDED / name).read_bytes()).hexdigest(), name
    recogniser = {path.name: path for path in (EMBEDDED.parent / "recogniser").iterdir()}
    assert scores["recogniser sha256"].keys() == recogniser.keys()
    for name, path in recogniser.items():
        assert scores["recogniser sha256"][name] == hashlib.sha256(path.read_bytes()).hexdigest(), name
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) < 18_400_000


EMBEDDED_PROCESSOR = load_processor(EMBEDDED)
SPOKEN = "abcdefghijklmnopqrstuvwxyz0123456789&%+=@"
"""Of these the embedded voice says something; other signs are for breaks and tones."""
CASES = json.loads((DIRECTORY / "tokenizer_cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=[case["text"] for case in CASES])
def test_tokenizes_as_the_reference(case: dict[str, Any]) -> None:
    assert processor().tokenize(case["text"]) == case["ids"]


@pytest.mark.parametrize(
    ("embedded", "texts", "says"),
    [
        (False, ("say <|audio_start|> now", "<s>", "a</s>", "<unk>", "<|ref_audio_end|>"), "special token"),
        (False, ("", "  ", "\n\t"), "nothing to speak"),
        (True, ("{", "\u4f60\u597d", "\u2603 ~"), "no character that this model can speak"),
    ],
)
def test_texts_that_cannot_be_spoken_are_refused(embedded: bool, texts: tuple[str, ...], says: str) -> None:
    for text in texts:
        with pytest.raises(InputError, match=says) as caught:
            (EMBEDDED_PROCESSOR if embedded else processor()).tokenize(text)
        assert caught.value.field == "input"


@pytest.mark.parametrize(
    ("reference", "prompt", "ids", "mask"),
    [
        (0, 0, [7, 8, 101], "000"),
        (2, 0, [103, 0, 0, 104, 7, 8, 101], "0110000"),
        (0, 3, [7, 8, 101, 0, 0, 0], "000111"),
        (1, 2, [103, 0, 104, 7, 8, 101, 0, 0], "01000011"),
    ],
)
def test_layouts(reference: int, prompt: int, ids: list[int], mask: str) -> None:
    layout = processor().layout([7, 8], reference_patches=reference, prompt_patches=prompt)
    assert layout.token_ids.tolist() == ids
    assert "".join("01"[int(bit)] for bit in layout.audio_mask) == mask


def test_layout_leaves_room_to_speak() -> None:
    assert len(processor().layout([5] * 254).token_ids) == 255
    with pytest.raises(InputError, match="256"):
        processor().layout([5] * 255)


@given(st.text().filter(lambda text: "<" not in text), st.sampled_from(SPOKEN), st.text(st.characters(codec="ascii")))
def test_embedded_tokenizer_leaves_out_what_it_never_learned(before: str, spoken: str, behind: str) -> None:
    ids = EMBEDDED_PROCESSOR.tokenize(f"{before}{spoken}{behind.replace('<', ' ')}")
    assert ids
    assert not {0, 1, 2, 101, 102, 103, 104} & set(ids)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Hello, the red fox costs 42 dollars!", "hello, the red fox costs 42 dollars!"),
        ("  Café —\n two  (2)", "cafe , two (2)"),
        ("Zoë Ångström", "zoe angstrom"),
        ("50% of x & y", "50 percent of x and y"),
        ("don’t 你好 \U0001f600 go", "don't go"),
    ],
)
def test_what_is_spoken_of_a_text(text: str, meant: str) -> None:
    assert EMBEDDED_PROCESSOR.tokenize(text) == EMBEDDED_PROCESSOR.tokenize(meant)


def test_letters_and_signs_that_are_left_out_are_named() -> None:
    processor = EMBEDDED_PROCESSOR
    assert processor.unspoken('50% of x & y = 5 + (2), "so" [I] think… `it\'s` - a/b_c') == ""
    assert processor.unspoken("C# ~ $ 5 * √2 # Łódź 你") == "#~$*√Ł你"
