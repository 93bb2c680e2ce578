"""The checkpoint in the package: as the gates export it byte for byte, small, measured, and fit for any text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.checkpoints.registry import family_of
from models.qwen_vl.processor import load_processor
from tests.support.processes import ROOT
from training.loop import publish
from training.vision import calibration, outside
from training.vision.conversations import encode
from training.vision.gates import NAMES, NOT_PROMISED, Scores, examples
from training.vision.network import PUBLISHED as DIRECTORY
from training.vision.network import load
from training.vision.questions import ONLY

pytestmark = pytest.mark.slow
WEIGHTS = DIRECTORY / "model.safetensors"
GATES = json.loads((DIRECTORY.parent / "gates_qwen2_vl.json").read_text(encoding="utf-8"))
OUTSIDE = json.loads((DIRECTORY.parent / "outside_qwen2_vl.json").read_text(encoding="utf-8"))


def test_an_export_makes_the_files(tmp_path: Path) -> None:
    assert family_of(DIRECTORY).name == "qwen2_vl"
    publish(DIRECTORY, tmp_path, load_file(WEIGHTS))
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
    assert OUTSIDE["sha256"] == GATES["sha256"]
    assert set(outside.GATES) <= set(OUTSIDE) and outside.failures(OUTSIDE) == OUTSIDE["failed"] == []


def test_any_text_survives_the_tokenizer() -> None:
    processor = load_processor(DIRECTORY)
    text = "naïve café 你好 🙂 \x00\t\r\n <|im_end|>"
    ids = processor.tokenize(text)
    assert b"".join(processor.detokenize([token]) for token in ids).decode() == text
    assert max(ids) < processor.vocab_size


@torch.no_grad()
def test_questions_by_hand_are_asked_and_judged() -> None:
    network = load(WEIGHTS, torch.device("cpu"))
    shown = outside.picture([outside.drawn(outside.DATA["known"]["HELLO"])])
    answer = outside.said(network, shown, "What does it say?")
    assert answer == 'It says "HELLO".'
    assert outside.is_right(answer, "word|hello,says") and not outside.is_right(answer, "hello,world")
    assert sum(len(scene["asks"]) for scene in outside.DATA["known"].values()) >= 150
    assert sum(len(frames) for frames in outside.clips()) > 900


def test_calibration_raises_one_logit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = examples("plain", calibration.EXAMPLES // 50)  # without print, which needs fonts
    monkeypatch.setattr(calibration, "EXAMPLES", len(drawn))
    monkeypatch.setattr(calibration, "make_example", lambda random: drawn[random.randrange(len(drawn))])
    calibration.calibrate(WEIGHTS, tmp_path / "out")
    before, after = load_file(WEIGHTS), load_file(tmp_path / "out")
    moved = (after["model.embed_tokens.weight"].float() - before["model.embed_tokens.weight"].float()).nonzero()[:, 0]
    first, second = encode(ONLY)[:2]
    assert set(moved.tolist()) == {second}
    assert all(torch.equal(before[name], after[name]) for name in before if "embed_tokens" not in name)
    rows = calibration.hidden_behind(load(WEIGHTS, torch.device("cpu")), first)
    change = after["model.embed_tokens.weight"][second].float() - before["model.embed_tokens.weight"][second].float()
    assert len(rows) >= 4 and torch.allclose(rows @ change, torch.tensor(calibration.NATS), atol=0.5)
