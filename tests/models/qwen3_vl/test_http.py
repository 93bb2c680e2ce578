"""Qwen3-VL behind the whole server, through the openai client: pictures, videos with their times, turns, tools,
thinking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from service.link.messages import ChatRequest
from tests.api.chat.test_tools import fits
from tests.models.qwen3_vl.golden import BOTH, DENSE, INSTRUCT, THINKING
from tests.support.golden import media_files
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

FLAGS: dict[str, Any] = {
    "model": tuple(str(golden.directory) for golden in BOTH.values()),
    "served_model_name": tuple(f"{golden.directory}={kind}" for kind, golden in BOTH.items()),
    "device": "cpu",
    "kv_cache_tokens": 4096,
    "max_running": 2,
    "encoder_buckets": (160,),
}
OF_PICTURES = [
    (kind, name)
    for kind, golden in BOTH.items()
    for name in golden.prompts
    if not media_files(golden.directory, name, "video") and not golden.inputs["prompts"][name]["add_vision_id"]
]
OF_TOOLS = [(kind, name) for kind, name in OF_PICTURES if "tools" in BOTH[kind].inputs["prompts"][name]]


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with openai_client(FLAGS) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "name"), [case for case in OF_PICTURES if case not in OF_TOOLS])
def test_golden_answers(client: OpenAI, kind: str, name: str, stream: bool) -> None:
    """A Thinking checkpoint's answer begins inside the reasoning, and these never leave it. With tools, answers
    that are not UTF-8 are barred."""
    golden = BOTH[kind]
    tokens = golden.inputs["max_new_tokens"]
    messages = conversation(golden.directory, name)
    answer = ask(client, messages, stream=stream, model=kind, max_tokens=tokens, temperature=0, extra_body=EXACT)
    ids = golden.expected[f"prompt.{name}.generated_ids"].tolist()
    said = golden.processor.detokenize(ids).decode(errors="replace")
    inside = golden.processor.reasoning_markers is not None
    assert (answer.content, answer.reasoning) == (("", said) if inside else (said, ""))
    expected_prompt = len(golden.expected[f"prompt.{name}.input_ids"])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected_prompt, tokens)


@pytest.mark.parametrize(("fps", "frames"), [(None, 8), (1.0, 4), (5.0, 20)])
def test_a_video_is_two_frames_a_second_or_fps(client: OpenAI, fps: float | None, frames: int) -> None:
    """20 frames at 5 a second."""
    part = video_part(frames=20, rate=5, **({"fps": fps} if fps else {}))
    answer = ask(client, [part, text_part()], model="dense", max_tokens=4, extra_body={"ignore_eos": True})
    sampled, item = sampled_item(DENSE.processor, frames=20, rate=5, fps=fps)
    assert sampled == frames
    assert answer.usage.prompt_tokens == prompt_tokens(DENSE.processor, item)
    assert answer.usage.completion_tokens == 4


def test_thinking_has_no_switch(client: OpenAI) -> None:
    """What a checkpoint does anyway may be asked for, and so may, by clients that always ask, no thinking."""
    for kind, golden in BOTH.items():
        for body in (
            *({"chat_template_kwargs": {name: False}} for name in ("enable_thinking", "thinking")),
            *({name: False} for name in ("enable_thinking", "think", "thinking")),
            {"thinking": {"type": "disabled"}, "reasoning": {"effort": "low", "exclude": False}},
        ):
            assert ask(client, "why ?", model=kind, max_tokens=2, extra_body=body)
        for path, body in {
            "chat_template_kwargs.enable_thinking": {"chat_template_kwargs": {"enable_thinking": True}},
            "think": {"think": True},
            "thinking": {"thinking": {"type": "enabled"}},
            "reasoning.enabled": {"reasoning": {"enabled": True}},
        }.items():
            if golden.processor.reasoning_markers is not None:
                assert ask(client, "why ?", model=kind, max_tokens=2, extra_body=body)
                continue
            with pytest.raises(BadRequestError, match="no reasoning mode") as refused:
                ask(client, "why ?", model=kind, max_tokens=2, extra_body=body)
            assert refused.value.param == path


@pytest.mark.parametrize(("kind", "name"), OF_TOOLS)
def test_a_conversation_with_tools_gives_the_golden_prompt(kind: str, name: str) -> None:
    """Answers, with their reasoning and calls, are sent back as they came."""
    golden = BOTH[kind]
    script = Script(golden.processor.tokenize)
    tools, thinks = golden.inputs["prompts"][name]["tools"], golden.processor.reasoning_markers is not None
    with openai_client(FLAGS, scripted_engine(script)) as client:
        messages = conversation(golden.directory, name)
        talk_with_tools(client, script, messages, thinks=thinks, model=kind, tools=tools)
    assert script.prompts[-1] == golden.expected[f"prompt.{name}.input_ids"].tolist()


def test_a_required_call(client: OpenAI) -> None:
    check_required_call(client, INSTRUCT)


CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def text_of_prompt(request: ChatRequest) -> list[int]:
    """Where the model thinks, after the end of a thought."""
    processor = BOTH[request.model].processor
    thought = "" if processor.reasoning_markers is None else "so < it is</think>\n\n"
    if request.grammar:
        assert fits(request.grammar, thought + CALL) and not fits(request.grammar, CALL)
        assert not fits(request.grammar, f"{CALL}</think>") and not fits(request.grammar, f"{thought}No.")
        return processor.tokenize(thought + CALL)
    return processor.tokenize(thought + processor.detokenize(request.prompt.token_ids.tolist()).decode())


def test_a_required_call_of_a_thinking_checkpoint_follows_its_reasoning(client: OpenAI, scripted: OpenAI) -> None:
    """Random weights never end their reasoning: those of the engine reach the limit without a call."""
    fields: dict[str, Any] = {
        "model": THINKING,
        "messages": [{"role": "user", "content": "why ?"}],
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "tool_choice": "required",
        "max_tokens": 20,
    }
    (answer,) = scripted.chat.completions.create(**fields).choices
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    assert answer.message.model_extra == {"reasoning_content": "so < it is", "reasoning": "so < it is"}
    assert [call.function.name for call in answer.message.tool_calls or []] == ["look"]
    (answer,) = client.chat.completions.create(**fields).choices
    assert (answer.finish_reason, answer.message.tool_calls) == ("length", None)
    assert answer.message.model_extra and answer.message.model_extra["reasoning_content"]


@pytest.fixture(scope="module")
def scripted() -> Iterator[OpenAI]:
    with openai_client(FLAGS, scripted_engine(text_of_prompt)) as client:
        yield client


def test_reasoning_is_apart_in_answers_and_streams(scripted: OpenAI) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "why ?"},
        {"role": "assistant", "content": "<think>\nlong thoughts\n</think>\n\nIt is blue."},
        {"role": "user", "content": "I say </think> here."},
    ]
    prompt = "user\nwhy ?\nassistant\nIt is blue.\nuser\nI say </think> here.\nassistant\n<think>\n"
    for stream in (False, True):
        answer = ask(scripted, messages, stream=stream, model=THINKING)
        assert (answer.content, answer.reasoning) == (prompt, "so < it is")
    assert len(BOTH[THINKING].processor.tokenize("</think>")) > 1  # of a user it is text


def test_reasoning_that_is_sent_back_reaches_the_template(scripted: OpenAI) -> None:
    def prompt_with(reasoning: Any, role: str = "assistant") -> str:
        messages = [
            {"role": "user", "content": "why ?"},
            {"role": role, "content": "It is blue.", "reasoning_content": reasoning},
        ]
        return ask(scripted, messages, model=THINKING).content

    question, opened = "user\nwhy ?\n", "assistant\n<think>\n"
    thought = f"{opened}long < thoughts\n</think>\n\nIt is blue.\n"
    assert prompt_with("long < thoughts\n") == question + thought + opened
    assert "long" not in prompt_with("long < thoughts", role="user") and "long" not in prompt_with(None)
    with pytest.raises(BadRequestError, match="must be a string") as refused:
        prompt_with(["long"])
    assert refused.value.param == "messages[1].reasoning_content"


FILE = {"frames": 20, "rate": 5}
TIMES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a file": (video_part(**FILE), ["0.3", "1.3", "2.5", "3.5"]),
    "a file, fps": (video_part(**FILE, fps=1.0), ["0.6", "3.2"]),
    "a file, num_frames": (video_part(**FILE, num_frames=6), ["0.4", "1.9", "3.4"]),
    "a file, max_frames": (video_part(**FILE, max_frames=4), ["0.6", "3.2"]),
    "a list, fps": (frame_list_part([jpeg()] * 6, fps=4.0), ["0.1", "0.6", "1.1"]),
    "a list, times": (frame_list_part([jpeg()] * 5, times=[0, 1, 10, 30.5, 60]), ["0.5", "20.2", "60.0"]),
    "a list, max_frames": (frame_list_part([jpeg()] * 6, fps=4.0, max_frames=4), ["0.2", "1.0"]),
}


@pytest.mark.parametrize("way", TIMES)
def test_the_times_of_a_video_are_its_own(scripted: OpenAI, way: str) -> None:
    """20 frames at 5 a second, and lists of frames: before each pair the mean of its two times."""
    part, times = TIMES[way]
    expected = "".join(f"<{time} seconds>" for time in times)
    assert ask(scripted, [part], model=INSTRUCT).content == f"user\n{expected}\nassistant\n"
