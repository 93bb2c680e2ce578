"""Qwen3-ForcedAligner against the published implementation: words, ids, classes, times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoints.registry import family_of, resolve
from models.interfaces.errors import InputError
from models.interfaces.media import Prompt
from models.qwen3_asr.aligner import repaired, split_words
from models.qwen3_asr.config import load_config
from service.engine.chat.guided.mask_server import build_tokenizer
from tests.models.families.family import Family
from tests.models.families.test_loading import json_of
from tests.models.qwen3_asr.golden import samples
from tests.models.qwen3_asr.test_loading import CONVERTED
from tests.support.chat_golden import encode, generate, largest_difference
from tests.support.golden import copy_checkpoint
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.slow import slow

ALIGNED = Family("qwen3_asr_aligner")
ALIGNER, INPUTS, CPU = ALIGNED.directory, ALIGNED.inputs, torch.device("cpu")


def prompt(name: str) -> Prompt:
    spec = INPUTS["items"][name]
    words = ALIGNED.processor.words(spec["text"], spec["language"])
    assert words == spec["words"]
    made: Prompt = ALIGNED.processor.alignment_prompt(ALIGNED.processor.item(samples(name)), words)
    return made


def check_times(name: str, classes: np.ndarray) -> None:
    spec = INPUTS["items"][name]
    assert classes.tolist() == ALIGNED.expected[f"item.{name}.classes"].tolist()
    found = ALIGNED.processor.aligned(spec["words"], classes)
    assert [{"text": one.word, "start_time": one.start, "end_time": one.end} for one in found] == spec["times"]


def test_ids_embeddings_classes_and_times() -> None:
    for name in INPUTS["items"]:
        one = prompt(name)
        assert one.token_ids.tolist() == ALIGNED.expected[f"item.{name}.input_ids"].tolist()
        embeds = encode(ALIGNED.model.encoder, one.items, CPU)
        assert largest_difference(embeds, ALIGNED.expected[f"item.{name}.embeds"]) <= 5e-5
        logits, _, _ = generate(ALIGNED.model, one, 1, chunk=13)
        assert one.marks is not None
        logits = logits[one.marks.astype(np.int64)]
        assert largest_difference(logits, ALIGNED.expected[f"item.{name}.logits"]) <= 1e-3
        check_times(name, logits.argmax(dim=1).numpy())


@pytest.mark.parametrize(("step_tokens", "graphs"), [(24, True), slow(512, False)])
def test_times_from_the_engine(step_tokens: int, graphs: bool) -> None:
    """In chunks that cut the marks, in a batch; a second time, when all but the marks is cached."""
    engine = InlineEngine(ALIGNED.model, ALIGNED.processor, num_pages=512, max_step_tokens=step_tokens, graphs=graphs)
    for turn in range(2):
        for name in INPUTS["items"]:
            engine.submit(f"{name} {turn}", prompt(name), max_tokens=1)
        engine.run()
    assert not engine.failures()
    for turn in range(2):
        for name in INPUTS["items"]:
            check_times(name, engine.classes(f"{name} {turn}"))
    cached = engine.cached_tokens()
    for name in INPUTS["items"]:
        first = int(prompt(name).marks[0])
        assert first - first % 4 == cached[f"{name} 1"]
    assert {route for kind, route in engine.routes() if "prefill" in kind} == {"replay" if graphs else "eager"}
    engine.assert_nothing_left()
    build_tokenizer(ALIGNED.processor, ALIGNED.processor.vocab_size)  # as the engine does for grammars of any model


def as_the_makers_publish(directory: Path) -> None:
    """Only fields of thinker_config tell the aligner from a recogniser."""
    tensors = load_file(directory / "model.safetensors")
    for new, old in (("thinker.lm_head.", "score."), *CONVERTED):
        tensors = {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    config = json_of(directory, "config.json")
    inner = {name: config[name] for name in ("audio_config", "text_config", "audio_token_id")}
    inner |= {"model_type": "qwen3_forced_aligner", "classify_num": len(config["id2label"])}
    whole = {"architectures": ["Qwen3ASRForConditionalGeneration"], "model_type": "qwen3_asr", "thinker_config": inner}
    whole |= {"timestamp_token_id": config["timestamp_token_id"], "timestamp_segment_time": 80}
    (directory / "config.json").write_text(json.dumps(whole))
    (directory / "processor_config.json").unlink()


def test_the_makers_layout(tmp_path: Path) -> None:
    directory = copy_checkpoint(ALIGNER, tmp_path / "published")
    as_the_makers_publish(directory)
    family = family_of(directory)
    assert (family.name, family.task) == ("qwen3_aligner", "alignment")
    assert load_config(directory).aligner == load_config(ALIGNER).aligner
    logits, _, _ = generate(resolve(family.model)(directory, CPU, torch.float32), prompt("hum"), 1)
    assert largest_difference(logits[prompt("hum").marks], ALIGNED.expected["item.hum.logits"]) <= 1e-3


def test_what_an_aligner_refuses() -> None:
    with pytest.raises(InputError, match="Swedish cannot be aligned; these can: Cantonese Chinese"):
        ALIGNED.processor.words("hej", "Swedish")
    with pytest.raises(InputError, match="text in this script cannot be aligned"):
        ALIGNED.processor.words("Ένα, two")
    assert ALIGNED.processor.words("Two, трое 三") == ["Two", "трое", "三"]
    with pytest.raises(InputError, match="answers no messages"):
        ALIGNED.processor.apply_chat_template([], [], options={})
    with pytest.raises(InputError, match="longer than the 180 seconds"):
        ALIGNED.processor.item(np.zeros(181 * 16_000, np.float32))


def test_words_and_repaired_times() -> None:
    for case in INPUTS["words"]:
        assert list(split_words(case["text"])) == case["words"], case["text"]
    for case in INPUTS["fix_timestamps"]:
        assert repaired(case["raw_ms"]) == case["fixed_ms"]
    assert repaired([]) == []
    assert list(split_words("これは本", kana=True)) == ["こ", "れ", "は", "本"]
