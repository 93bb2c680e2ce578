"""The golden directory of Qwen2-VL, for tests of the engine and of quantisation."""

from __future__ import annotations

from tests.models.families.family import FAMILIES

FAMILY = FAMILIES["qwen2_vl"]
DIRECTORY, INPUTS, PROMPTS, TOKENS = FAMILY.directory, FAMILY.inputs, FAMILY.prompts, FAMILY.tokens
model, prompt, golden_tokens = FAMILY.on, FAMILY.prompt, FAMILY.golden_tokens


def processor() -> object:
    return FAMILY.processor


def expected() -> dict:
    return FAMILY.expected
