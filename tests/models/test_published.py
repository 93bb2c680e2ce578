"""Fields of published JSON files that come in several forms."""

from __future__ import annotations

from typing import Any

import pytest

from models.checkpoints.published import stop_token_ids


@pytest.mark.parametrize(
    ("generation", "default", "expected"),
    [
        ({}, None, set()),
        ({}, 5, {5}),
        ({}, [5, 6], {5, 6}),
        ({"eos_token_id": 7}, 5, {7}),
        ({"eos_token_id": [7, 8]}, 5, {7, 8}),
        ({"eos_token_id": None}, 5, {5}),
        ({"eos_token_id": None}, None, set()),
    ],
)
def test_an_answer_ends_at_the_eos_ids_of_the_file_and_at_named_special_tokens(
    generation: dict[str, Any], default: Any, expected: set[int]
) -> None:
    assert stop_token_ids(generation, {}, (), default) == expected
    assert stop_token_ids(generation, {"<end>": 9}, ("<end>", "<other>"), default) == expected | {9}
