"""The schema of the benchmarks of guided answers."""

from __future__ import annotations

from typing import Any


def invoice(number: int = 0) -> dict[str, Any]:
    """A schema whose answers are longer than any round; other numbers make other grammars."""
    line = {
        "type": "object",
        "properties": {
            "article": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            "description": {"type": "string", "maxLength": 60},
            "quantity": {"type": "integer", "minimum": 1, "maximum": 1000 + number},
            "price": {"type": "number", "minimum": 0},
            "unit": {"enum": ["piece", "kg", "hour", "box"]},
        },
        "required": ["article", "description", "quantity", "price", "unit"],
        "additionalProperties": False,
    }
    lines = {"type": "array", "items": line, "minItems": 200}
    names = {"customer": {"type": "string", "maxLength": 40}, "date": {"type": "string", "format": "date"}}
    return {
        "type": "object",
        "properties": {**names, "lines": lines},
        "required": ["customer", "date", "lines"],
        "additionalProperties": False,
    }
