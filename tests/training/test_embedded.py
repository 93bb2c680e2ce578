"""The checkpoint in the package: made by its script byte for byte, small, measured, and fit for any text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from models.checkpoints.registry import family_of
from models.qwen_vl.processor import load_processor
from tests.support.processes import ROOT
from training.vision import outside
from training.vision.checkpoint import load, make
from training.vision.conversations import Encoder
from training.vision.gates import NAMES, NOT_PROMISED, Scores
from training.vision.vocabulary import PUBLISHED as DIRECTORY

pytestmark = pytest.mark.slow
WEIGHTS = DIRECTORY / "model.safetensors"
GATES = json.loads((DIRECTORY.parent / "gates_qwen2_vl.json").read_text(encoding="utf-8"))


def test_the_script_makes_the_files(tmp_path: Path) -> None:
    assert family_of(DIRECTORY).name == "qwen2_vl"
    make(tmp_path, WEIGHTS)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in DIRECTORY.iterdir() if path.is_file())
    for name in names:
        assert (tmp_path / name).read_bytes() == (DIRECTORY / name).read_bytes(), name
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= 10_000_000


def test_the_sample_has_every_promised_gate() -> None:
    entries = json.loads((ROOT / "tests/golden/world/questions.json").read_text(encoding="utf-8"))
    assert {entry["gate"] for entry in entries} == set(NAMES) - NOT_PROMISED


def test_its_gates_were_measured_on_these_weights_and_hold() -> None:
    assert GATES["sha256"] == hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()
    assert set(NAMES) <= set(GATES["right"])
    scores = Scores(GATES["right"], GATES["known_things_refused"], GATES["yes"], {})
    assert scores.failures() == GATES["failed"] == []


def test_any_text_survives_the_tokenizer() -> None:
    processor = load_processor(DIRECTORY)
    text = "naïve café 你好 🙂 \x00\t\r\n <|im_end|>"
    ids = processor.tokenize(text)
    assert b"".join(processor.detokenize([token]) for token in ids).decode() == text
    assert max(ids) < processor.vocab_size


@torch.no_grad()
def test_questions_by_hand_are_asked_and_judged() -> None:
    network, shown = (
        load(WEIGHTS, torch.device("cpu")),
        outside.picture([outside.drawn(outside.DATA["known"]["HELLO"])]),
    )
    answer = outside.said(network, Encoder(DIRECTORY), shown, outside.seen(network, shown), "What does it say?")
    assert answer == 'It says "HELLO".'
    assert outside.is_right(answer, "word|hello,says") and not outside.is_right(answer, "hello,world")
    assert sum(len(scene["asks"]) for scene in outside.DATA["known"].values()) >= 150
    assert sum(len(frames) for frames in outside.clips()) > 900
