"""The checkpoint in the package: made by its script byte for byte, small, loadable, and fit for any text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from models.embedded.make_qwen2_vl import DIRECTORY, make
from models.media import ChatMessage, ContentPart
from models.qwen2_vl.model import load_model
from models.qwen2_vl.processor import load_processor
from models.registry import family_of
from tests.support.chat_golden import generate
from tests.support.prompts import prompt_of


def test_the_script_makes_the_files(tmp_path: Path) -> None:
    make(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in DIRECTORY.iterdir() if path.is_file())
    for name in names:
        assert (tmp_path / name).read_bytes() == (DIRECTORY / name).read_bytes(), name
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) < 3_000_000


def test_it_answers_and_the_picture_matters() -> None:
    assert family_of(DIRECTORY).name == "qwen2_vl"
    processor = load_processor(DIRECTORY)
    model = load_model(DIRECTORY, "cpu", torch.float32)
    answers = []
    for seed in range(2):
        pixels = np.random.default_rng(seed).integers(0, 256, (90, 120, 3), dtype=np.uint8)
        item = processor.image(Image.fromarray(pixels))
        message = ChatMessage("user", (ContentPart(item=0), ContentPart(text="What is this?")))
        answers.append(generate(model, prompt_of(processor, [message], [item]), 12)[2])
    assert answers[0] != answers[1]
    assert all(processor.detokenize(answer) for answer in answers)


def test_any_text_survives_the_tokenizer() -> None:
    processor = load_processor(DIRECTORY)
    text = "naïve café 你好 🙂 \x00\t\r\n <|im_end|>"
    ids = processor.tokenize(text)
    assert b"".join(processor.detokenize([token]) for token in ids).decode() == text
    assert max(ids) < processor.vocab_size
