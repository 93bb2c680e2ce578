"""What every chat family's processor promises: text stays text, refusals name the field, digests tell apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from models.interfaces.errors import InputError
from models.interfaces.media import VideoFrames, VideoMetadata, source_digest
from tests.models.families.family import ALL, FAMILIES, Family, families
from tests.support.prompts import prompt_of, say

EVERY = families(quick=ALL)
STOPS = {
    "minicpmv_2_5": {"<|eot_id|>", "<|end_of_text|>"},
    "minicpmv_4_0": {"<|im_end|>", "</s>"},
    "kimi_vl": {"[EOS]", "<|im_end|>", "[EOT]"},
}
SAMPLING = {
    "qwen2_5_vl": {"temperature": 1e-6, "repetition_penalty": 1.05},
    "minicpmv_2_6": {"temperature": 0.7, "top_p": 0.8, "top_k": 100, "repetition_penalty": 1.05},
}


def specials(family: Family) -> dict[str, int]:
    return family.processor.tokenizer.special_ids


def kept(family: Family, *texts: str) -> tuple[list[int], str]:
    """Special tokens of a prompt with these texts of a user, and what it says."""
    special = set(specials(family).values())
    ids = prompt_of(family.processor, [say("user", *texts)]).token_ids.tolist()
    return [token for token in ids if token in special], family.processor.detokenize(ids).decode()


@pytest.mark.parametrize("family", EVERY)
@settings(max_examples=30)
@given(data=st.data())
def test_text_of_users_never_makes_special_tokens(family: Family, data: st.DataObject) -> None:
    hostile = st.sampled_from([*specials(family), "<|im_", "end|>", "<", "|>", "\ufdd0", "\ufdd1", "a", " ", "\n"])
    texts = data.draw(st.lists(st.lists(hostile, max_size=6).map("".join), min_size=1, max_size=3))
    told, said = kept(family, "a", *texts, "a")
    assert told == kept(family, "a")[0]
    separator = "\n" if "minicpmv" in family.name else ""
    assert separator.join(("a", *texts, "a")) in said


@pytest.mark.parametrize("family", EVERY)
def test_prompts_that_cannot_be_taken_are_refused(family: Family) -> None:
    processor = family.processor
    with pytest.raises(InputError, match="'function'") as refused:
        prompt_of(processor, [say("function", "x")])
    assert refused.value.field == "messages"
    with pytest.raises(InputError, match=f"maximum context length is {processor.context_length}") as refused:
        prompt_of(processor, [say("user", "x " * (processor.context_length + 9))])
    assert refused.value.field == "messages"
    assert prompt_of(processor, [say("user", "x")], options={"enable_thinking": False})  # many clients always say so
    if processor.reasoning_markers is None:
        with pytest.raises(InputError) as refused:
            prompt_of(processor, [say("user", "x")], options={"enable_thinking": True})
        assert refused.value.field == "enable_thinking"


@pytest.mark.parametrize("family", EVERY)
def test_answers_end_and_are_sampled_as_the_files_say(family: Family) -> None:
    ids = specials(family)
    stops = STOPS.get(family.name, {"<|im_end|>", "<|endoftext|>"})
    assert family.processor.stop_token_ids == {ids[name] for name in stops}
    if family.name in SAMPLING:
        assert family.processor.generation_defaults == SAMPLING[family.name]


@pytest.mark.parametrize("family", EVERY)
def test_digests_tell_apart_pixels_kind_source_and_detail(family: Family) -> None:
    processor = family.processor
    large, other = Image.effect_noise((700, 500), 50).convert("RGB"), Image.new("RGB", (700, 500))
    plain, low = processor.image(large), processor.image(large, detail="low")
    assert low.num_embeds <= plain.num_embeds
    assert processor.image(large.copy(), detail="high").digest == plain.digest
    clip = VideoFrames((np.asarray(large),), (0,), (0.0,), VideoMetadata(1, 1.0, 1.0, 500, 700))
    sources = [source_digest(name) for name in (b"one", b"other")]
    named = [processor.image(large, source=source).digest for source in sources]
    digests = [plain.digest, processor.image(other).digest, processor.video(clip).digest, *named]
    assert len(set(digests)) == len(digests)
    assert processor.image(other, source=sources[0]).digest == named[0]


@pytest.mark.parametrize("family", EVERY)
def test_frames_may_be_resized_as_they_are_decoded(family: Family) -> None:
    frames = tuple(np.random.default_rng(0).integers(0, 256, (5, 101, 250, 3), np.uint8))
    whole = VideoFrames(frames, (0, 2, 4, 6, 8), (0.0, 1.0, 2.0, 3.0, 4.0), VideoMetadata(10, 2.0, 5.0, 101, 250))
    resizer = family.processor.frame_resizer(whole.metadata, 5)
    resized = tuple(map(resizer, frames))
    assert {frame.nbytes for frame in resized} == {resizer.num_bytes}
    one, other = map(family.processor.video, (whole, replace(whole, frames=resized, resizer=resizer)))
    assert one.digest == other.digest and one.num_embeds == other.num_embeds
    assert all(map(np.array_equal, one.frames, other.frames))


@pytest.mark.parametrize("family", EVERY)
def test_media_that_cannot_be_taken_are_refused(family: Family) -> None:
    if "minicpmv" not in family.name:  # minicpmv/test_processor.py
        with pytest.raises(InputError) as refused:
            family.processor.image(Image.new("RGB", (60_000, 1)))
        assert refused.value.field == "image_url"


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5", "minicpmv_4_5", "kimi_vl"])
def test_families_that_think_name_their_markers(name: str) -> None:
    opening, closing = FAMILIES[name].processor.reasoning_markers
    assert "think" in opening and "/think" in closing
