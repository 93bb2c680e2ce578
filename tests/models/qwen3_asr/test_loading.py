"""Both published layouts load; what the family does not compute is refused by file and field."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoints.registry import family_of, resolve
from models.interfaces.errors import CheckpointError, InputError
from models.qwen3_asr.config import load_config
from models.qwen3_asr.processor import load_processor
from tests.models.families.family import RECOGNISER
from tests.models.families.test_loading import ABSENT, change, json_of
from tests.models.qwen3_asr.golden import DIRECTORY
from tests.support.chat_golden import generate, largest_difference
from tests.support.golden import copy_checkpoint
from tests.support.inference import no_gradients as no_gradients

CONVERTED = (
    ("thinker.audio_tower.proj1.", "model.multi_modal_projector.linear_1."),
    ("thinker.audio_tower.proj2.", "model.multi_modal_projector.linear_2."),
    ("thinker.audio_tower.", "model.audio_tower."),
    ("thinker.model.", "model.language_model."),
)


def as_transformers_5_saves(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["thinker.lm_head.weight"]
    for old, new in CONVERTED:
        tensors = {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    inner = json_of(directory, "config.json")["thinker_config"]
    audio, text = inner["audio_config"], inner["text_config"]
    audio["num_attention_heads"] = audio.pop("encoder_attention_heads")
    del text["rope_scaling"], text["tie_word_embeddings"]
    text["rope_parameters"] = {"rope_theta": text.pop("rope_theta"), "rope_type": "default"}
    values = {"audio_config": audio, "text_config": text, "tie_word_embeddings": True}
    change(directory, "config.json", {**values, "audio_token_id": inner["audio_token_id"], "thinker_config": ABSENT})
    (directory / "preprocessor_config.json").unlink()
    (directory / "processor_config.json").write_text('{"feature_extractor": {"min_length": 8000, "n_fft": 400}}')


def test_the_layout_of_transformers_5(tmp_path: Path) -> None:
    directory = copy_checkpoint(DIRECTORY, tmp_path / "saved")
    as_transformers_5_saves(directory)
    assert load_config(directory).audio == load_config(DIRECTORY).audio
    model = resolve(family_of(directory).model)(directory, torch.device("cpu"), torch.float32)
    logits, _, ids = generate(model, RECOGNISER.prompt("short"), 20)
    assert largest_difference(logits, RECOGNISER.of("short", "logits")) <= 1e-3
    assert ids == RECOGNISER.of("short", "generated_ids").tolist()


def test_a_tokenizer_without_the_tag_is_refused(tmp_path: Path) -> None:
    directory = copy_checkpoint(DIRECTORY, tmp_path / "tagless")
    tokens = json_of(directory, "tokenizer_config.json")["added_tokens_decoder"]
    kept = {number: token for number, token in tokens.items() if token["content"] != "<asr_text>"}
    change(directory, "tokenizer_config.json", {"added_tokens_decoder": kept})
    with pytest.raises(CheckpointError, match="<asr_text> is no added token"):
        load_processor(directory)


def test_languages_by_name_code_and_region() -> None:
    processor = load_processor(DIRECTORY)
    assert processor.languages == {"zh": "Chinese", "en": "English", "de": "German"}
    for asked in ("en", "EN", "en-US", "en_gb", "English", "english "):
        assert processor.language(asked) == "English"
    with pytest.raises(InputError, match=r"'xx' is not a language .* zh \(Chinese\), en \(English\)"):
        processor.language("xx")
