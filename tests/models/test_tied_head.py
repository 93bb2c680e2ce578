"""Heads that a configuration calls tied to the embedding table, against what the files hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models.checkpoints.checkpoint import Source
from models.checkpoints.tied_head import with_the_files_head
from models.interfaces.errors import CheckpointError
from models.layers.block import BlockConfig
from models.layers.decoder import DecoderConfig

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


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/model.safetensors cannot be read"):
        loaded(tmp_path)
