"""The published templates of Qwen3.5, 3.6 and 3.8, and of small models that think only when they are asked to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from models.interfaces.errors import InputError
from models.text.chat_template import ChatTemplate
from tests.models.families.family import FAMILIES

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
