"""Every chat family behind the whole server, through the openai client: pictures, videos, turns, tools, thinking."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from models.checkpoints.registry import family_of, resolve
from service.link.messages import ChatRequest
from tests.api.chat.test_tools import fits
from tests.models.families.family import FAMILIES, Family
from tests.support.chat_golden import generate, golden_prompt
from tests.support.golden import golden_parts
from tests.support.openai_chat import (
    EXACT,
    Script,
    ask,
    check_required_call,
    conversation,
    frame_list_part,
    jpeg,
    openai_client,
    prompt_tokens,
    sampled_item,
    scripted_engine,
    talk_with_tools,
    text_part,
    video_part,
)
from tests.support.rows import rows
from tests.support.tool_samples import call_text, xml_call_text

pytestmark = pytest.mark.slow

HOSTED = [family for name, family in FAMILIES.items() if name != "qwen2_vl"]
"""The embedded model of Qwen2-VL answers in tests/api."""
FLAGS: dict[str, Any] = {
    "model": tuple(str(family.directory) for family in HOSTED),
    "served_model_name": tuple(f"{family.directory}={family.name}" for family in HOSTED),
    "device": "cpu",
    "kv_cache_tokens": 8192,
    "max_running": 2,
    "max_frames": 768,
}
INSTRUCT, THINKING = sorted(
    ("qwen3_vl", "qwen3_vl_moe"), key=lambda name: FAMILIES[name].processor.reasoning_markers is not None
)


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with openai_client(FLAGS, encoder_buckets=(420, 1024)) as client:
        yield client


@cache
def served(family: Family) -> Any:
    """The processor as the server has it: with the checkpoint's own limits of frames."""
    return resolve(family_of(family.directory).processor)(family.directory)


def text_of(family: Family, ids: list[int]) -> str:
    """Special ids, which golden answers hold, have no text."""
    return served(family).detokenize(ids).decode(errors="replace")


def of_pictures(family: Family, name: str) -> bool:
    """Frames would be sampled anew; with tools, answers that are not UTF-8 are barred."""
    spec = family.inputs["prompts"][name]
    videos = any(part["type"] == "video" for part in golden_parts(family.directory, name))
    return not videos and "tools" not in spec and "max_slice_nums" not in spec


def template_options(family: Family, name: str) -> dict[str, Any]:
    spec = family.inputs["prompts"][name]
    numbered = {"add_vision_id": True} if spec.get("add_vision_id") else {}
    options = numbered | spec.get("template_kwargs", {})
    return {"chat_template_kwargs": options} if options else {}


@pytest.mark.parametrize("family", HOSTED, ids=lambda family: family.name)
def test_golden_answers(client: OpenAI, family: Family) -> None:
    """Where a prompt opens the reasoning, answers begin inside, and these never leave it."""
    for name in filter(lambda name: of_pictures(family, name), family.prompts):
        body, messages = EXACT | template_options(family, name), conversation(family.directory, name)
        fields = {"model": family.name, "max_tokens": family.tokens, "temperature": 0, "extra_body": body}
        answer = ask(client, messages, stream=True, **fields)
        said = text_of(family, family.golden_tokens(name))
        inside = text_of(family, family.of(name, "input_ids").tolist()).rstrip().endswith("<think>")
        assert (answer.content, answer.reasoning) == (("", said) if inside else (said, "")), name
        usage = answer.usage.prompt_tokens, answer.usage.completion_tokens
        assert usage == (len(family.of(name, "input_ids")), family.tokens)


@pytest.mark.parametrize(
    ("name", "frames", "rate", "fps", "sampled"),
    [
        ("qwen3_vl", 20, 5, None, 8),
        ("qwen3_vl", 20, 5, 5.0, 20),
        ("kimi_vl", 20, 5, 2.0, 8),
        ("minicpmv_4_0", 20, 5, 2, 10),
        ("minicpmv_4_5", 20, 5, None, 12),
        # 5 a second of 36 whole seconds are 180 and not fused, although the video has one frame more.
        ("minicpmv_4_5", 181, 5, 5, 181),
        # Fused: in pairs.
        ("minicpmv_4_5", 250, 5, 5, 250),
    ],
)
def test_videos_are_sampled_as_the_model_says_or_the_request(
    client: OpenAI, name: str, frames: int, rate: int, fps: float | None, sampled: int
) -> None:
    part = video_part(frames=frames, rate=rate, **({"fps": fps} if fps else {}))
    body = {"ignore_eos": True}
    answer = ask(client, [part, text_part()], stream=True, model=name, max_tokens=4, extra_body=body)
    processor = served(FAMILIES[name])
    count, item = sampled_item(processor, frames=frames, rate=rate, fps=fps, max_frames=768)
    assert count == sampled
    if frames == 250:
        assert len(item.arrays["group_sizes"]) == 125
    assert answer.usage.prompt_tokens == prompt_tokens(processor, item)
    assert answer.usage.completion_tokens == 4


def test_thinking_of_qwen3_vl_has_no_switch(client: OpenAI) -> None:
    """What a checkpoint does anyway may be asked for, and so may, by clients that always ask, no thinking."""
    for name in (INSTRUCT, THINKING):
        for body in (
            *({"chat_template_kwargs": {option: False}} for option in ("enable_thinking", "thinking")),
            *({option: False} for option in ("enable_thinking", "think", "thinking")),
            {"thinking": {"type": "disabled"}, "reasoning": {"effort": "low", "exclude": False}},
        ):
            assert ask(client, "why ?", model=name, max_tokens=2, extra_body=body)
        for path, body in {
            "chat_template_kwargs.enable_thinking": {"chat_template_kwargs": {"enable_thinking": True}},
            "think": {"think": True},
            "thinking": {"thinking": {"type": "enabled"}},
            "reasoning.enabled": {"reasoning": {"enabled": True}},
        }.items():
            if name == THINKING:
                assert ask(client, "why ?", model=name, max_tokens=2, extra_body=body)
                continue
            with pytest.raises(BadRequestError, match="no reasoning mode") as refused:
                ask(client, "why ?", model=name, max_tokens=2, extra_body=body)
            assert refused.value.param == path


@pytest.mark.parametrize("name", [INSTRUCT, THINKING, "qwen3_5", "qwen3_5_moe"])
def test_a_conversation_with_tools_gives_the_golden_prompt(name: str) -> None:
    """Answers, with their reasoning and calls, are sent back as they came."""
    family = FAMILIES[name]
    (prompt,) = (prompt for prompt in family.prompts if "tools" in family.inputs["prompts"][prompt])
    script, tools = Script(family.processor.tokenize), family.inputs["prompts"][prompt]["tools"]
    with openai_client(FLAGS, scripted_engine(script)) as client:
        messages = conversation(family.directory, prompt)
        written = xml_call_text if family.processor.call_format == "xml" else call_text
        fields = {"thinks": name != INSTRUCT, "call_text": written, "model": name, "tools": tools}
        talk_with_tools(client, script, messages, **fields)
    assert script.prompts[-1] == family.of(prompt, "input_ids").tolist()


@pytest.mark.parametrize("name", ["qwen2_5_vl", INSTRUCT, "qwen3_5", "qwen3_5_moe"])
def test_a_required_call(client: OpenAI, name: str) -> None:
    """Random weights never end reasoning."""
    without = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    check_required_call(client, name, **(without if "qwen3_5" in name else {}))


CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def text_of_prompt(request: ChatRequest) -> list[int]:
    """Where the model thinks, after the end of a thought."""
    processor = FAMILIES[request.model].processor
    thought = "so < it is</think>\n\n" if request.model == THINKING else ""
    if request.grammar:
        assert fits(request.grammar, thought + CALL) and not fits(request.grammar, CALL)
        assert not fits(request.grammar, f"{CALL}</think>") and not fits(request.grammar, f"{thought}No.")
        return processor.tokenize(thought + CALL)
    return processor.tokenize(thought + processor.detokenize(request.prompt.token_ids.tolist()).decode())


@pytest.fixture(scope="module")
def scripted() -> Iterator[OpenAI]:
    with openai_client(FLAGS, scripted_engine(text_of_prompt)) as client:
        yield client


def test_a_required_call_of_a_thinking_checkpoint_follows_its_reasoning(scripted: OpenAI) -> None:
    (answer,) = scripted.chat.completions.create(
        model=THINKING,
        messages=[{"role": "user", "content": "why ?"}],
        tools=[{"type": "function", "function": {"name": "look"}}],
        tool_choice="required",
    ).choices
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    assert answer.message.model_extra == {"reasoning_content": "so < it is", "reasoning": "so < it is"}
    assert [call.function.name for call in answer.message.tool_calls or []] == ["look"]


def test_reasoning_that_is_sent_back_reaches_the_template(scripted: OpenAI) -> None:
    def prompt_with(reasoning: Any, role: str = "assistant", name: str = "reasoning_content") -> str:
        answer = {"role": role, "content": "It is blue.", name: reasoning}
        return ask(scripted, [{"role": "user", "content": "why ?"}, answer], model=THINKING).content

    question, opened = "user\nwhy ?\n", "assistant\n<think>\n"
    thought = f"{opened}long < thoughts\n</think>\n\nIt is blue.\n"
    for name in ("reasoning_content", "reasoning"):
        assert prompt_with("long < thoughts\n", name=name) == question + thought + opened
    assert "long" not in prompt_with("long < thoughts", role="user") and "long" not in prompt_with(None)
    with pytest.raises(BadRequestError, match="must be a string") as refused:
        prompt_with(["long"])
    assert refused.value.param == "messages[1].reasoning_content"


def listed(**options: Any) -> dict[str, Any]:
    return frame_list_part([jpeg()] * 6, **options)


FILE, SLOWLY = {"frames": 20, "rate": 5}, ["1.0", "5.0", "9.0"]
TIMES: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (video_part(**FILE), {}, ["0.3", "1.3", "2.5", "3.5"]),
    (video_part(**FILE, fps=1.0), {}, ["0.6", "3.2"]),
    (video_part(**FILE, num_frames=6), {}, ["0.4", "1.9", "3.4"]),
    (video_part(**FILE, max_frames=4), {}, ["0.6", "3.2"]),
    (listed(), {}, ["0.2", "1.2", "2.2"]),
    (listed(fps=4.0, max_frames=4), {}, ["0.2", "1.0"]),
    (listed(fps=0.5), {}, SLOWLY),
    (listed() | {"fps": 0.5}, {}, SLOWLY),
    (listed(), {"media_io_kwargs": {"video": {"fps": 0.5}}}, SLOWLY),
    (listed(), {"mm_processor_kwargs": {"fps": 0.5}}, SLOWLY),
    (listed(fps=0.5) | {"fps": 9}, {"media_io_kwargs": {"video": {"fps": 7}}}, SLOWLY),
]


def test_the_times_of_a_video_are_its_own(scripted: OpenAI) -> None:
    """Of files and lists of frames: before each pair the mean of its two times. The rate stands inside the part's
    object, beside it, for all media or for the processor; the nearest one counts."""
    for part, fields, times in TIMES:
        expected = "".join(f"<{time} seconds>" for time in times)
        answer = ask(scripted, [part], model=INSTRUCT, extra_body=fields)
        assert answer.content == f"user\n{expected}\nassistant\n"


def test_what_cannot_be_done_is_named(client: OpenAI) -> None:
    """Samplings of a video, and options that a template does not have."""
    for case in rows(__file__, "refused_options.jsonl"):
        content = [listed(**case["video"]), text_part()] if "video" in case else "why ?"
        with pytest.raises(BadRequestError, match=case["says"]) as refused:
            ask(client, content, model=case["model"], extra_body=case["fields"])
        assert refused.value.param == case["param"]


def test_a_request_chooses_how_many_tokens_a_picture_has(client: OpenAI) -> None:
    """The answers are those of the processor of each mode, whatever others ask for; the file says 16x."""
    family, name = FAMILIES["minicpmv_4_6"], "image"
    messages, lengths = conversation(family.directory, name), []
    for mode in ("4x", "16x", None, "4x"):
        prompt = golden_prompt(served(family).modes[mode or "16x"], family.directory, name)
        body = EXACT | ({"mm_processor_kwargs": {"downsample_mode": mode}} if mode else {})
        fields = {"model": family.name, "max_tokens": family.tokens, "temperature": 0, "extra_body": body}
        answer = ask(client, messages, **fields)
        assert answer.content == text_of(family, generate(family.model, prompt, family.tokens)[2])
        assert answer.usage.prompt_tokens == len(prompt.token_ids)
        lengths.append(len(prompt.token_ids))
    assert lengths[0] == lengths[3] > lengths[1] == lengths[2]
