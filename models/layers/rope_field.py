"""Where config.json has its rotary parameters. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rope_field(text: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and content of the field of a language model's configuration that describes rotary positions: rope_scaling,
    or rope_parameters as transformers 5 writes it. If there are both, rope_scaling counts, as in transformers 5. Its
    rope_theta takes precedence over a rope_theta beside it."""
    if text.get("rope_scaling") or not text.get("rope_parameters"):
        return "rope_scaling", text.get("rope_scaling") or {}
    return "rope_parameters", text["rope_parameters"]
