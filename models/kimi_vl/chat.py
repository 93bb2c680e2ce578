"""Defaults for what the files of Kimi-VL may leave out: the chat template, and the sampling that its makers
recommend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from models.checkpoints.published import published_name

PUBLISHED_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if loop.first and message['role'] != 'system' -%}"
    "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>"
    "{%- endif -%}"
    "<|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
    "{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "<|im_end|>"
    "{%- endfor -%}"
    "<|im_assistant|>assistant<|im_middle|>"
)
"""Renders like the published templates, for checkpoints without a template."""

_TEMPERATURES = (("thinking-2506", 0.8), ("thinking", 0.6), ("instruct", 0.2))
"""The makers' recommendations (model cards), by a part of the checkpoint's name; the first match counts."""


def recommended_sampling(directory: Path) -> Mapping[str, float]:
    """Sampling for files that name none. The files of Instruct and Thinking are alike in this respect, so the name
    decides."""
    name = published_name(directory).lower()
    return next(({"temperature": temperature} for text, temperature in _TEMPERATURES if text in name), {})
