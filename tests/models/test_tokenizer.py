"""What cannot be read as a tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from models.errors import CheckpointError
from models.registry import family_of, resolve
from tests.support.golden import GOLDEN


@pytest.mark.parametrize("family", ["qwen2_vl", "minicpmv_2_6", "voxcpm2"])
def test_a_model_that_the_library_does_not_know_is_refused(tmp_path: Path, family: str) -> None:
    directory = Path(shutil.copytree(GOLDEN / family, tmp_path / family))
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": {"type": "Unheard of"}}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        resolve(family_of(directory).processor)(directory)
