"""Text and prompt layouts of VoxCPM2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import models
from models.interfaces.errors import CheckpointError, InputError
from models.voxcpm2.config import load_config
from models.voxcpm2.processor import load_processor
from tests.models.voxcpm2.golden import DIRECTORY, processor

EMBEDDED = Path(models.__file__).parent / "embedded" / "voxcpm2"
SPOKEN = "abcdefghijklmnopqrstuvwxyz0123456789&%+=@"
"""Of these the embedded voice says something; other signs are for breaks and tones."""
CASES = json.loads((DIRECTORY / "tokenizer_cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=[case["text"] for case in CASES])
def test_tokenizes_as_the_reference(case: dict[str, Any]) -> None:
    assert processor().tokenize(case["text"]) == case["ids"]


@pytest.mark.parametrize("text", ["say <|audio_start|> now", "<s>", "a</s>", "<unk>", "<|ref_audio_end|>"])
def test_refuses_special_tokens_in_text(text: str) -> None:
    with pytest.raises(InputError, match="special token") as caught:
        processor().tokenize(text)
    assert caught.value.field == "input"


@pytest.mark.parametrize("text", ["", "  ", "\n\t"])
def test_refuses_silence(text: str) -> None:
    with pytest.raises(InputError, match="nothing to speak"):
        processor().tokenize(text)


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


@pytest.mark.slow
def test_needs_no_torch() -> None:
    code = "import sys; import models.voxcpm2.processor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=DIRECTORY.parents[2], check=False).returncode == 0


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("lm_config", "use_mup"), True, "use_mup"),
        (("lm_config", "rope_scaling", "type"), "yarn", "rope_scaling.type"),
        (("lm_config", "rope_scaling", "short_factor"), [1.0], "short_factor"),
        (("lm_config", "hidden_size"), "64", "lm_config.hidden_size"),
        (("residual_lm_no_rope",), False, "residual_lm_no_rope"),
        (("architecture",), "voxcpm", "architecture"),
        (("audio_vae_config", "use_noise_block"), True, "use_noise_block"),
        (("audio_vae_config", "out_sample_rate"), 24000, r"make 25 latent frames a second, .* decoder_rates 12\.5"),
        (("feat_dim",), 9, "latent_dim"),
        (("max_length",), 4096, "max_position_embeddings"),
        (("dit_config", "kv_channels"), 8, "dit_config.kv_channels"),
        (("encoder_config",), None, "encoder_config"),
    ],
)
def test_refuses_other_configurations(tmp_path: Path, path: tuple[str, ...], value: object, message: str) -> None:
    config = json.loads((DIRECTORY / "config.json").read_text())
    section = config
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_config(tmp_path)


@given(st.text().filter(lambda text: "<" not in text), st.sampled_from(SPOKEN), st.text(st.characters(codec="ascii")))
def test_embedded_tokenizer_leaves_out_what_it_never_learned(before: str, spoken: str, behind: str) -> None:
    ids = EMBEDDED_PROCESSOR.tokenize(f"{before}{spoken}{behind.replace('<', ' ')}")
    assert ids
    assert not {0, 1, 2, 101, 102, 103, 104} & set(ids)


@pytest.mark.parametrize("text", ["{", "\u4f60\u597d", "\u2603 ~"])
def test_a_text_without_anything_that_the_embedded_voice_learned_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no character that this model can speak"):
        EMBEDDED_PROCESSOR.tokenize(text)


EMBEDDED_PROCESSOR = load_processor(EMBEDDED)
