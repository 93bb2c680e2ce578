"""The published templates of Qwen3.5, 3.6 and 3.8, and of small models that think only when they are asked to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models.interfaces.errors import CheckpointError, InputError
from models.interfaces.media import ChatMessage
from models.qwen_vl.v3.config import load_config
from models.qwen_vl.v3_5.model import load_model
from models.text.chat_template import ChatTemplate
from service.api.chat.prompt import template_options
from service.api.chat.schema import ChatRequestBody
from service.api.http.errors import ApiError
from service.api.http.json_body import parse
from tests.models.families.family import FAMILIES
from tests.models.families.test_loading import ABSENT, apart, change, copy_of, tensors_of
from tests.support.golden import copy_checkpoint
from tests.support.inference import no_gradients as no_gradients
from tests.support.prompts import say

CASES: dict[str, Any] = json.loads((FAMILIES["qwen3_5_moe"].directory / "template_cases.json").read_text())
TEMPLATES = {name: ChatTemplate(source, {}) for name, source in CASES["templates"].items()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_case_is_rendered_as_by_transformers(name: str) -> None:
    template = TEMPLATES[name]
    assert template.knows_tools and template.call_format == "xml"
    for case, fields in CASES["cases"].items():
        expected = fields["rendered"][name]
        if expected is None:
            with pytest.raises(InputError):
                template.render(**fields["input"])
        else:
            assert template.render(**fields["input"]) == expected, case


def with_template(name: str, tmp_path: Path) -> Any:
    """The processor of the fixture with another of the published templates."""
    directory = copy_checkpoint(FAMILIES["qwen3_5_moe"].directory, tmp_path / name)
    (directory / "chat_template.jinja").write_text(CASES["templates"][name])
    return FAMILIES["qwen3_5_moe"].processor_of(directory)


def prompt_text(processor: Any, messages: list[ChatMessage], **options: Any) -> str:
    chat = processor.apply_chat_template(messages, (), options=options)
    return "".join(processor.detokenize([token]).decode(errors="replace") for token in chat.token_ids)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("3.5", {"enable_thinking"}),
        ("3.6", {"enable_thinking", "preserve_thinking"}),
        ("3.8", {"enable_thinking", "preserve_thinking", "reasoning_effort"}),
        ("3.5-small", {"enable_thinking"}),
    ],
)
def test_a_processor_passes_on_what_its_template_reads(tmp_path: Path, name: str, options: set[str]) -> None:
    processor = with_template(name, tmp_path)
    assert processor.template_options == options and processor.call_format == "xml"
    assert processor.reasoning_markers == ("<think>", "</think>")
    question = [say("user", "why ?")]
    assert prompt_text(processor, question, enable_thinking=True).endswith("<think>\n")
    assert prompt_text(processor, question, enable_thinking=False).endswith("</think>\n\n")
    assert prompt_text(processor, question).endswith("</think>\n\n" if "small" in name else "<think>\n")
    turns = [*question, say("assistant", "blue", reasoning="the sky"), *question]
    assert ("the sky" in prompt_text(processor, turns)) == (name == "3.8")
    for kept in (True, False):
        shown = "the sky" in prompt_text(processor, turns, preserve_thinking=kept)
        assert shown == (kept and "preserve_thinking" in options)
    within = [*question, say("assistant", "<think>the sky</think>blue"), *question]
    assert ("the sky" in prompt_text(processor, within)) == (name == "3.8")


def test_the_templates_own_words_refuse_a_conversation(tmp_path: Path) -> None:
    processor = with_template("3.8", tmp_path)
    for messages, words in (
        ([say("system", "s")], "No user query found"),
        ([say("user", "a"), say("developer", "s"), say("user", "b")], "System message must be at the beginning"),
    ):
        with pytest.raises(InputError, match=words) as refused:
            prompt_text(processor, messages)
        assert refused.value.field == "messages"


ALL = ("enable_thinking", "preserve_thinking", "reasoning_effort")


@pytest.mark.parametrize(
    ("fields", "known", "expected"),
    [
        ({"reasoning_effort": "high"}, ALL, {"reasoning_effort": "xhigh"}),
        ({"reasoning_effort": "low"}, ALL, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "low"}, ALL[:1], {}),
        ({"reasoning_effort": "minimal"}, ALL[:1], {"enable_thinking": False}),
        ({"reasoning_effort": "none"}, (), {}),
        ({"reasoning_effort": "none", "enable_thinking": True}, ALL, {"enable_thinking": True}),
        ({"reasoning": {"effort": "medium"}}, ALL, {"reasoning_effort": "medium"}),
        ({"chat_template_kwargs": {"reasoning_effort": "max"}}, ALL, {"reasoning_effort": "xhigh"}),
        ({"chat_template_kwargs": {"preserve_thinking": True}}, ALL, {"preserve_thinking": True}),
        ({"reasoning_effort": "tiny"}, ALL, "reasoning_effort"),
        ({"chat_template_kwargs": {"reasoning_effort": ["low"]}}, ALL, "chat_template_kwargs.reasoning_effort"),
        ({"reasoning": {"effort": "tiny"}}, ALL, "reasoning.effort"),
        ({"chat_template_kwargs": {"preserve_thinking": "yes"}}, ALL, "chat_template_kwargs.preserve_thinking"),
        ({"chat_template_kwargs": {"preserve_thinking": True}}, ALL[:1], "chat_template_kwargs"),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, (), "chat_template_kwargs"),
    ],
)
def test_options_of_a_request(fields: dict[str, Any], known: tuple[str, ...], expected: Any) -> None:
    """expected: the options of the template, or the field that is refused."""
    body = parse(
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "why ?"}], **fields}), ChatRequestBody
    )
    if isinstance(expected, str):
        with pytest.raises(ApiError) as refused:
            template_options(body, known)
        assert refused.value.param == expected
    else:
        assert template_options(body, known)[0] == expected


DENSE, MIXTURE = FAMILIES["qwen3_5"], FAMILIES["qwen3_5_moe"]


def test_experts_apart_are_those_in_one_tensor(tmp_path: Path) -> None:
    """The drafter's, too."""
    directory = copy_of(MIXTURE, tmp_path / "apart")
    save_file(apart(tensors_of(directory)), directory / "model.safetensors")
    loaded, expected = (
        load_model(path, "cpu", torch.float32, drafter=True).state_dict() for path in (directory, MIXTURE.directory)
    )
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())


def test_small_parameters_keep_their_digits() -> None:
    """A_log and the gated norms are float32 in the file; norms of rows become 1 + w in float32."""
    stored, layer = tensors_of(DENSE.directory), DENSE.fresh("cpu", torch.bfloat16).decoder.layers[0]
    prefix = "model.language_model.layers.0."
    assert torch.equal(layer.delta.A_log, stored[f"{prefix}linear_attn.A_log"])
    assert torch.equal(layer.delta.norm, stored[f"{prefix}linear_attn.norm.weight"])
    assert torch.equal(layer.attention_norm.weight, 1 + stored[f"{prefix}input_layernorm.weight"].float())


def test_the_drafter_may_be_left_out_but_has_no_unknown_tensors(tmp_path: Path) -> None:
    directory, tensors = copy_of(DENSE, tmp_path / "copy"), tensors_of(DENSE.directory)
    without = {name: value for name, value in tensors.items() if not name.startswith("mtp.")}
    save_file(without, directory / "model.safetensors")
    assert load_model(directory, "cpu", torch.float32, drafter=True).decoder.drafter is None
    save_file(tensors | {"mtp.other.weight": torch.zeros(2)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensors: .*mtp\.other\.weight"):
        DENSE.loaded(directory)


def test_the_interval_decides_without_a_list_of_layers(tmp_path: Path) -> None:
    directory = copy_checkpoint(DENSE.directory, tmp_path / "interval")
    change(directory, "config.json", {"layer_types": ABSENT}, "text_config")
    change(directory, "config.json", {"deepstack_visual_indexes": ABSENT}, "vision_config")
    assert load_config(directory).text["layer_types"] == load_config(DENSE.directory).text["layer_types"]
