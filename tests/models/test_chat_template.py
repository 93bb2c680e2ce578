"""Which of a checkpoint's files holds the chat template, what it renders, and placeholders in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from models.interfaces.errors import CheckpointError, InputError, PromptTooLong
from models.interfaces.media import ChatMessage, ContentPart, PlaceholderRange
from models.qwen_vl.processor import load_processor
from models.text.chat_template import ChatTemplate, load_chat_template
from models.text.placeholders import MediaTokens, check_length, expand, join, plain, repeated, tokenized_chat
from tests.support.golden import GOLDEN
from tests.support.prompts import prompt_of, say
from tests.support.rows import rows

TURN = [{"role": "user", "content": "hi"}]
TEXT_ONLY = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}<|im_start|>assistant\n"
)
"""A language model's template: it joins the content of a message as a string."""


FILES = {
    "tokenizer": ("tokenizer_config.json", '{"chat_template": "tokenizer"}'),
    "processor": ("chat_template.json", '{"chat_template": "processor"}'),
    "jinja": ("chat_template.jinja", "jinja"),
}


@pytest.mark.parametrize(
    "names", [("processor", "jinja", "tokenizer"), ("processor", "tokenizer"), ("jinja", "tokenizer"), ("jinja",)]
)
def test_templates_are_found_as_by_transformers(tmp_path: Path, names: tuple[str, ...]) -> None:
    """The first one is taken."""
    from transformers import ProcessorMixin

    (tmp_path / "tokenizer_config.json").write_text("{}")
    for file, text in map(FILES.__getitem__, names):
        (tmp_path / file).write_text(text)
    published, _ = ProcessorMixin.get_processor_dict(tmp_path)
    assert published.get("chat_template", "tokenizer") == names[0]
    assert load_chat_template(tmp_path).render(TURN) == names[0]


def test_a_checkpoint_without_a_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no chat template: chat_template\.json, .* must hold one"):
        load_chat_template(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": ["a"]}')
    with pytest.raises(CheckpointError, match=r"/chat_template\.json|: chat_template\.json: chat_template must be"):
        load_chat_template(tmp_path)


def test_several_templates_are_refused(tmp_path: Path) -> None:
    entries = [{"name": "default", "template": "usual"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template must be a string; several"):
        load_chat_template(tmp_path)


def layout(tmp_path: Path, *, multimodal: bool) -> Path:
    """Published Qwen2.5-VL: the language model's template in tokenizer_config.json, the other in chat_template.json."""
    path = tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen2_vl", path, ignore=shutil.ignore_patterns("images", "*.safetensors"))
    config = json.loads((path / "tokenizer_config.json").read_text()) | {"chat_template": TEXT_ONLY}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if not multimodal:
        (path / "chat_template.json").unlink()
    return path


SAID = say("user", 0, "what is it")


def test_a_picture_for_a_text_only_template_is_refused_clearly(tmp_path: Path) -> None:
    processor = load_processor(layout(tmp_path, multimodal=False))
    item = processor.image(Image.new("RGB", (56, 56)))
    with pytest.raises(InputError, match="chat template is for text alone: it takes no pictures or videos") as refused:
        prompt_of(processor, [SAID], [item])
    assert refused.value.field == "messages"
    assert len(prompt_of(processor, [say("user", "hi")]).token_ids)


def test_templates_find_what_transformers_gives_them() -> None:
    for source, rendered in (
        ('{{ {"b": "é", "a": [1]} | tojson(ensure_ascii=True) }}', '{"b": "\\u00e9", "a": [1]}'),
        ('{{ {"b": "é", "a": [1]} | tojson(separators=(",", ":"), sort_keys=true) }}', '{"a":[1],"b":"é"}'),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
    ):
        assert ChatTemplate(source, {}).render(TURN) == rendered


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n{% else %}{%- generation -%}  {{ m.content }}"
        "<|e|>\n{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}",
        "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content ~ x ~ loop.index }}"
        "{% endgeneration %}{{ x }}{% endfor %}",
    ],
)
def test_marks_for_training_are_rendered_as_transformers_does(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    said = [*TURN, {"role": "assistant", "content": " hello\n"}, *TURN]
    (rendered,), _ = render_jinja_template(conversations=[said], chat_template=source, add_generation_prompt=True)
    assert ChatTemplate(source, {}).render(said) == rendered


PARTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}"
    "{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
"""Such as templates of other vision models: to them a string is a list of characters, none of which is a text."""


def test_texts_come_as_parts_where_a_template_shows_no_strings(tmp_path: Path) -> None:
    usual = load_processor(GOLDEN / "qwen2_vl")
    path = layout(tmp_path, multimodal=True)
    (path / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    parts = load_processor(path)
    said = [say(role, role) for role in ("system", "user", "assistant")]
    messages, item = [*said, SAID], usual.image(Image.new("RGB", (56, 56)))
    ids, expected = (prompt_of(processor, messages, [item]).token_ids.tolist() for processor in (parts, usual))
    assert ids == expected


def test_which_roles_need_parts() -> None:
    for shown, *needed in rows(__file__, "needed_parts.jsonl"):
        assert ChatTemplate(f"{{% for m in messages %}}{shown}{{% endfor %}}", {}).parts_only == set(needed), shown


def test_results_of_tools_come_as_parts_where_a_template_shows_no_strings() -> None:
    calls = "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}{% endfor %}"
    template = ChatTemplate(
        PARTS.replace("{% endfor %}<|im_end|>", f"{{% endfor %}}{calls}{{{{ tools }}}}<|im_end|>"), {}
    )
    assert template.knows_tools
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert "sunny" in template.render([*TURN, asked, {"role": "tool", "content": "sunny"}])


def test_a_template_that_fails_on_a_conversation_makes_no_other_error() -> None:
    for fault in ("{{ 1 // 0 }}", "{{ messages[0].content | int(none) + 1 }}", "{{ 'x'.index('secret') }}"):
        with pytest.raises(InputError, match=r"cannot render these messages \(\w+Error\)") as refused:
            ChatTemplate(fault, {}).render([{"role": "user", "content": "secret"}])
        assert "secret" not in str(refused.value)


PLACEHOLDER, ROW = 1, 2
TEXT = st.lists(st.integers(10, 20), max_size=4)
PART = st.one_of(TEXT.map(plain), st.integers(1, 5).map(lambda count: repeated(ROW, count)))
MEDIA = st.lists(PART, min_size=1, max_size=4).map(join)


@given(TEXT, st.lists(st.tuples(MEDIA, st.integers(0, 3), TEXT), max_size=5))
def test_items_replace_placeholders(opening: list[int], following: list[tuple[MediaTokens, int, list[int]]]) -> None:
    tokens, expected = list(opening), list(opening)
    for media, _, text in following:
        tokens += [PLACEHOLDER, *text]
        expected += [*media.token_ids.tolist(), *text]
    message = ChatMessage("user", tuple(ContentPart(item=item) for _, item, _ in following))
    chat = tokenized_chat(tokens, [message], {PLACEHOLDER})
    token_ids, placeholders = expand(chat, [media for media, _, _ in following])
    assert token_ids.dtype == np.int32 and token_ids.tolist() == expected
    assert [run.item for run in placeholders] == [item for media, item, _ in following for _ in media.runs]
    rows = [index for run in placeholders for index in range(run.start, run.start + run.length)]
    assert rows == [index for index, token in enumerate(expected) if token == ROW]


def test_runs_that_meet_stay_apart() -> None:
    chat = tokenized_chat([PLACEHOLDER], [say("user", 0)], {PLACEHOLDER})
    _, placeholders = expand(chat, [join([repeated(ROW, 2), repeated(ROW, 3)])])
    assert placeholders == (PlaceholderRange(0, 0, 2), PlaceholderRange(0, 2, 3))


def test_a_template_that_drops_or_makes_placeholders_is_refused() -> None:
    for count in (0, 2):
        with pytest.raises(InputError, match=f"shows {count} of the 1 pictures"):
            tokenized_chat([PLACEHOLDER] * count, [say("user", 0)], {PLACEHOLDER})


def test_a_prompt_leaves_room_for_an_answer() -> None:
    check_length(np.zeros(7, np.int32), 8)
    with pytest.raises(PromptTooLong, match="length is 8 tokens, of which the prompt takes 8 and the answer"):
        check_length(np.zeros(8, np.int32), 8)
