"""Files that published tokenizers come in: their fields mean what they mean to transformers, or they are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from models.checkpoints.registry import family_of, resolve
from models.interfaces.errors import CheckpointError
from models.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.golden import GOLDEN, copy_checkpoint, fact_of_own_fixture, read_json

pytestmark = fact_of_own_fixture

FAMILIES = ("qwen2_vl", "minicpmv_2_5", "minicpmv_4_0")
"""Byte-level; byte-level with an opening token; with byte fallback and an opening token."""
TEXT = "<|im_start|>user\nA text that is longer than the eight tokens of training.<|im_end|>"
ESCAPE = "\ufdd0"
TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "!",
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("left", [{"truncation": TRUNCATION}, {"padding": PADDING}], ids=["truncation", "padding"])
def test_what_training_left_in_the_file_changes_no_ids(family: str, left: dict[str, Any]) -> None:
    published = read_json(GOLDEN / family, "tokenizer.json")
    usual, trained = Tokenizer(published), Tokenizer({**published, **left})
    assert trained.encode(TEXT, ESCAPE) == usual.encode(TEXT, ESCAPE)
    assert trained.encode_plain(TEXT) == usual.encode_plain(TEXT)


def test_what_depends_on_the_text_around_is_refused() -> None:
    published = read_json(GOLDEN / "minicpmv_4_0", "tokenizer.json")
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    for step in (metaspace, {"type": "Sequence", "pretokenizers": [metaspace]}):
        with pytest.raises(CheckpointError, match="prepend_scheme 'first'"):
            Tokenizer({**published, "normalizer": None, "pre_tokenizer": step})
    last = published["added_tokens"][-1]
    for flag in ("single_word", "lstrip", "rstrip"):
        added = [*published["added_tokens"][:-1], {**last, flag: True}]
        with pytest.raises(CheckpointError, match=f"{flag} of added token '</image_id>'"):
            Tokenizer({**published, "added_tokens": added})


@pytest.mark.parametrize("family", ["minicpmv_2_5", "minicpmv_4_0"])
def test_an_end_that_training_puts_behind_texts_is_not_in_prompts(family: str) -> None:
    published = read_json(GOLDEN / family, "tokenizer.json")
    usual, name = Tokenizer(published), published["added_tokens"][-1]["content"]
    end = {"id": name, "ids": [published["added_tokens"][-1]["id"]], "tokens": [name]}
    steps = published["post_processor"].get("processors", [published["post_processor"]])
    template = next(step for step in steps if step["type"] == "TemplateProcessing")
    template["single"].append({"SpecialToken": {"id": name, "type_id": 0}})
    template["special_tokens"][name] = end
    assert Library.from_str(json.dumps(published)).encode(TEXT).ids[-1] == end["ids"][0]
    assert Tokenizer(published).encode(TEXT, ESCAPE) == usual.encode(TEXT, ESCAPE)


@pytest.mark.parametrize("family", FAMILIES)
def test_added_tokens_of_the_tokenizers_configuration(family: str, tmp_path: Path) -> None:
    """transformers adds those that tokenizer.json lacks, and takes the flags of the others from there."""
    directory = copy_checkpoint(GOLDEN / family, tmp_path / "fine-tuned")
    usual = load_tokenizer(directory)
    published, config = read_json(directory, "tokenizer.json"), read_json(directory, "tokenizer_config.json")
    *kept, shown, lost = published["added_tokens"]
    (directory / "tokenizer.json").write_text(json.dumps({**published, "added_tokens": [*kept, shown]}))
    config["added_tokens_decoder"][str(shown["id"])]["special"] = False
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    changed = load_tokenizer(directory)
    assert changed.special_ids == usual.special_ids and changed.vocab_size == usual.vocab_size
    text = f"{TEXT}{lost['content']} b{lost['content']}"
    assert changed.encode(text, ESCAPE) == usual.encode(text, ESCAPE)
    assert changed.decode([shown["id"], lost["id"]]).decode() == shown["content"]


@pytest.mark.parametrize("family", ["qwen2_vl", "minicpmv_2_6", "voxcpm2"])
def test_a_model_that_the_library_does_not_know_is_refused(tmp_path: Path, family: str) -> None:
    directory = Path(shutil.copytree(GOLDEN / family, tmp_path / family))
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": {"type": "Unheard of"}}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        resolve(family_of(directory).processor)(directory)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "minicpmv_2_6", "minicpmv_4_5"])
def test_vocabulary_and_merges_take_the_place_of_a_missing_file(family: str, tmp_path: Path) -> None:
    """As tokenizers of transformers without the library saved them, with their added tokens in the configuration."""
    directory = copy_checkpoint(GOLDEN / family, tmp_path / "slow")
    usual = load_tokenizer(directory)
    (directory / "tokenizer.json").unlink()
    slow = load_tokenizer(directory)
    assert slow.special_ids == usual.special_ids and slow.vocab_size == usual.vocab_size
    for text in (TEXT, "I'LL say 1234 e\u0301\n\n  \t日本語 🎉 \r\n x", "The theatre there, then.  "):
        assert slow.encode(text, ESCAPE) == usual.encode(text, ESCAPE)
        assert slow.decode(slow.encode_plain(text)) == usual.decode(usual.encode_plain(text))


def test_vocabularies_without_their_class_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    directory = copy_checkpoint(GOLDEN / "qwen2_vl", tmp_path / "slow")
    (directory / "tokenizer.json").unlink()
    merges = (directory / "merges.txt").read_text()
    (directory / "merges.txt").write_text(merges + "nowhere found\n")
    with pytest.raises(CheckpointError, match=rf"merges\.txt: line {merges.count(chr(10)) + 1} is no pair of tokens"):
        load_tokenizer(directory)
    (directory / "merges.txt").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing\. vocab\.json and merges\.txt can"):
        load_tokenizer(directory)
    (directory / "merges.txt").write_text(merges)
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(CheckpointError, match=r"tokenizer_class is 'LlamaTokenizer'.*save_pretrained"):
        load_tokenizer(directory)
