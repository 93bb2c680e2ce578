"""Pictures, videos with their times, and prompts of Qwen3-VL."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from models.interfaces.errors import CheckpointError, InputError
from models.interfaces.media import ChatMessage, MediaItem, ToolCall, VideoFrames, VideoMetadata
from models.qwen_vl.v3.config import load_config
from models.qwen_vl.v3.processor import Qwen3VLProcessor, load_processor
from models.qwen_vl.v3.videos import FrameRule, pair_tenths, sample_frames, time_text, video_size
from tests.models.families.family import FAMILIES, Family
from tests.support.golden import copy_checkpoint
from tests.support.prompts import prompt_of, say

PICTURES = {"factor": 32, "min_pixels": 65_536, "max_pixels": 16_777_216}
VIDEOS = {"pair": 2, "factor": 32, "min_pixels": 4_096, "max_pixels": 25_165_824}
DENSE, MIXTURE = FAMILIES["qwen3_vl"], FAMILIES["qwen3_vl_moe"]
EITHER = [pytest.param(family, id=family.name) for family in (DENSE, MIXTURE)]


def metadata(num_frames: int, fps: float) -> VideoMetadata:
    return VideoMetadata(num_frames, fps, num_frames / fps if fps else 0.0, 48, 64)


def video_of(count: int, *, fps: float = 2.0, indices: tuple[int, ...] | None = None, seed: int = 0) -> VideoFrames:
    frames = np.random.default_rng(seed).integers(0, 256, (count, 48, 64, 3), dtype=np.uint8)
    indices = indices or tuple(range(count))
    times = tuple(3.0 * index for index in indices)  # unlike index / fps
    return VideoFrames(tuple(frames), indices, times, metadata(indices[-1] + 1, fps))


@pytest.mark.slow
@settings(deadline=None)  # of which the import takes seconds
@given(frames=st.integers(2, 300), height=st.integers(1, 2200), width=st.integers(1, 4000))
def test_frame_sizes_are_the_references(frames: int, height: int, width: int) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as reference

    limits = {"factor": 32, "min_pixels": 4_096, "max_pixels": 25_165_824}
    try:
        expected = reference(frames, height, width, temporal_factor=2, **limits)
    except ValueError:
        with pytest.raises(ValueError, match="200:1"):
            video_size(frames, height, width, **VIDEOS)
        return
    assert video_size(frames, height, width, **VIDEOS) == expected


@pytest.mark.slow
@given(
    total=st.integers(1, 2000),
    fps=st.sampled_from([8.0, 24.0, 29.97]),
    rule=st.builds(
        FrameRule, fps=st.sampled_from([0.5, 1, 2.0, 5]), min_frames=st.integers(1, 20), max_frames=st.integers(1, 99)
    ),
)
@settings(deadline=None)  # of which the import takes seconds
def test_frames_by_a_checkpoints_rule_are_the_references(total: int, fps: float, rule: FrameRule) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata as Metadata

    reference = Qwen3VLVideoProcessor(fps=rule.fps, min_frames=rule.min_frames, max_frames=rule.max_frames)
    expected = reference.sample_frames(Metadata(total_num_frames=total, fps=fps)).tolist()
    assert sample_frames(metadata(total, fps), fps=None, max_frames=9999, rule=rule) == expected


def test_a_request_goes_before_the_checkpoints_rule() -> None:
    rule, source = FrameRule(fps=1.0, min_frames=8, max_frames=20), metadata(2400, 24.0)

    def count(fps: float | None, max_frames: int, video: VideoMetadata = source) -> int:
        return len(sample_frames(video, fps=fps, max_frames=max_frames, rule=rule))

    assert (count(None, 768), count(0.1, 768), count(2.0, 768)) == (20, 10, 20)
    assert (count(None, 5), count(0.01, 768)) == (5, 8)
    # num_frames comes as the source's rate, which a source may lack.
    assert (count(24.0, 64), count(0.0, 64, metadata(2400, 0.0))) == (64, 64)
    assert count(2.0, 768, replace(metadata(40, 2.0), listed=True)) == 40


@pytest.mark.parametrize("golden", EITHER)
def test_the_checkpoints_rule_is_in_its_file_of_videos(golden: Family, tmp_path: Path) -> None:
    directory = copy_checkpoint(golden.directory, tmp_path / "rule")
    path = directory / "video_preprocessor_config.json"
    fields = json.loads(path.read_text())
    assert load_config(directory).frames == FrameRule(2.0, 4, 768)
    fields |= {"fps": 1, "min_frames": 2, "max_frames": 10}
    path.write_text(json.dumps(fields))
    processor = load_processor(directory)
    assert len(processor.sample_video(metadata(240, 24.0), fps=None, max_frames=768)) == 10
    assert len(processor.sample_video(metadata(72, 24.0), fps=None, max_frames=768)) == 3
    (directory / "processor_config.json").write_text(json.dumps({"video_processor": {**fields, "fps": 3}}))
    assert load_config(directory).frames == FrameRule(3, 2, 10)
    (directory / "processor_config.json").unlink()
    path.write_text(json.dumps({**fields, "fps": "two"}))
    with pytest.raises(CheckpointError, match=r'config\.json: fps is "two", expected a positive number'):
        load_processor(directory)


@pytest.mark.parametrize("golden", EITHER)
def test_times_are_the_means_of_pairs_in_the_source(golden: Family) -> None:
    cases = golden.inputs["timestamps"]
    assert cases
    for case in cases:
        indices = tuple(case["frames_indices"])
        video = VideoFrames((), indices, (), metadata(indices[-1] + 1, case["fps"]))
        assert [time_text(tenths) for tenths in pair_tenths(video, 2)] == case["text"], case


def test_a_source_without_a_rate_brings_the_times_of_its_frames() -> None:
    assert pair_tenths(video_of(4, fps=0.0), 2) == [15, 75]
    assert pair_tenths(video_of(4, fps=2.0), 2) == [2, 12]


def test_the_rate_changes_the_prompt_and_the_digest() -> None:
    processor = DENSE.processor
    message = say("user", 0)
    slow, fast = (processor.video(video_of(4, fps=fps)) for fps in (0.25, 4.0))
    assert slow.digest != fast.digest and slow.num_embeds == fast.num_embeds
    texts = [processor.detokenize(prompt_of(processor, [message], [item]).token_ids.tolist()) for item in (slow, fast)]
    assert b"<2.0 seconds><10.0 seconds>" in texts[0] and b"<0.1 seconds><0.6 seconds>" in texts[1]


def rendered(golden: Family, *messages: ChatMessage) -> str:
    return golden.processor.detokenize(prompt_of(golden.processor, messages).token_ids.tolist()).decode()


def test_reasoning_of_earlier_answers_is_dropped_by_thinking_checkpoints() -> None:
    talk = say("user", "a"), say("assistant", "<think>\nb\n</think>\n\nc"), say("user", "d")
    assert rendered(MIXTURE, *talk) == "user\na\nassistant\nc\nuser\nd\nassistant\n<think>\n"
    assert rendered(DENSE, *talk) == "user\na\nassistant\n<think>\nb\n</think>\n\nc\nuser\nd\nassistant\n"
    assert MIXTURE.processor.reasoning_markers == ("<think>", "</think>")
    assert DENSE.processor.reasoning_markers is None


@pytest.mark.parametrize("golden", [DENSE, MIXTURE], ids=["instruct", "thinking"])
def test_a_template_that_refuses_a_bare_question(golden: Family, tmp_path: Path) -> None:
    """Fine-tuned checkpoints have such templates; requests without a system message are refused, the start is not."""
    directory = copy_checkpoint(golden.directory, tmp_path / "strict")
    template = json.loads((directory / "chat_template.json").read_text())["chat_template"]
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}" + template
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": strict}))
    processor = load_processor(directory)
    assert processor.reasoning_markers == golden.processor.reasoning_markers
    with pytest.raises(InputError, match="no system message"):
        prompt_of(processor, [say("user", "x")])


def test_reasoning_apart_from_the_answer_stays_until_the_next_question() -> None:
    """In a loop of tools a Thinking checkpoint sees its own. The Instruct template has no place for it."""
    call = ToolCall("look", {"at": "it"})

    def talk(reasoning: str | None, *further: ChatMessage) -> tuple[ChatMessage, ...]:
        answer = say("assistant", "c", calls=[call], reasoning=reasoning)
        return say("user", "a"), answer, say("tool", "r"), *further

    called = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
    result = "user\n<tool_response>\nr\n</tool_response>\n"
    for thought in ("b", "\nb\n", "b</think>b"):
        kept = f"user\na\nassistant\n<think>\n{thought.strip()}\n</think>\n\nc\n{called}\n{result}"
        assert rendered(MIXTURE, *talk(thought)) == f"{kept}assistant\n<think>\n"
        dropped = f"user\na\nassistant\nc\n{called}\n{result}user\nd\nassistant\n<think>\n"
        assert rendered(MIXTURE, *talk(thought, say("user", "d"))) == dropped
        assert rendered(DENSE, *talk(thought)) == rendered(DENSE, *talk(None))
    for nothing in ("", "\n"):
        assert rendered(MIXTURE, *talk(nothing)) == rendered(MIXTURE, *talk(None))
    inside = say("assistant", "<think>\nb\n</think>\n\nc")
    assert rendered(MIXTURE, say("user", "a"), inside) == rendered(
        MIXTURE, say("user", "a"), say("assistant", "c", reasoning="b")
    )


def test_line_breaks_that_the_template_strips_are_stripped() -> None:
    """Behind reasoning that is kept, those at the start of the answer; elsewhere they stay."""

    def talk(text: str, *further: ChatMessage) -> str:
        answer = say("assistant", text, calls=[ToolCall("look", {})], reasoning="b")
        return rendered(MIXTURE, say("user", " a\n"), answer, say("tool", "\nr"), *further)

    called = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    result = "user\n<tool_response>\n\nr\n</tool_response>\n"
    for text in ("\n\nc \n", "c \n"):
        assert talk(text).startswith(f"user\n a\n\nassistant\n<think>\nb\n</think>\n\nc \n\n{called}\n{result}")
    assert talk("\nc", say("user", "d")).startswith(f"user\n a\n\nassistant\n\nc\n{called}\n{result}")


@pytest.mark.parametrize("golden", EITHER)
def test_an_empty_answer_with_calls_is_one_without_text(golden: Family) -> None:
    """Clients send "content": "" beside calls as often as null. The template breaks the line before a call only behind
    text."""

    def asked(*content: str) -> list[int]:
        calling = say("assistant", *content, calls=[ToolCall("look", {"at": "it"})])
        messages = [say("user", "why ?"), calling, say("tool", "so .")]
        return prompt_of(golden.processor, messages).token_ids.tolist()

    assert asked("") == asked()
    assert asked("hm") != asked()


def test_pictures_where_the_template_takes_none_are_refused() -> None:
    item: MediaItem = DENSE.items(DENSE.images[0])[0]
    message = say("system", 0, "look")
    with pytest.raises(InputError, match="shows 0 of the 1 pictures"):
        prompt_of(DENSE.processor, [message, say("user", "a")], [item])


def test_detail_low_bounds_a_picture() -> None:
    dense = DENSE.processor
    published = replace(dense.config.images, min_pixels=PICTURES["min_pixels"], max_pixels=PICTURES["max_pixels"])
    config = replace(dense.config, images=published)
    processor = Qwen3VLProcessor(config, dense.tokenizer, dense.template, {})
    picture = Image.new("RGB", (1024, 1024))
    auto, low = (processor.image(picture, detail=detail) for detail in ("auto", "low"))
    assert (auto.num_embeds, low.num_embeds) == (1024, 256)
