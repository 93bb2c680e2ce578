"""Guided rows in the engine: their answers match, and nobody beside them notices."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from torch import Tensor

import service.engine.engine
from models.interfaces.capturable import Bucket, Capturable
from service.api.structured.grammar import choice_grammar, json_schema_grammar, lark_grammar, regex_grammar
from service.engine.chat.guided import mask_server
from service.graphs.pool import Capture, GraphPool
from tests.support.devices import DEVICES
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.slow import slow
from tests.support.tiny_chat import END_TOKEN, tiny_item, tiny_prompt, tiny_text
from tests.support.waiting import GENEROUS, wait

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": -5, "maximum": 99},
        "colors": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "count", "colors"],
    "additionalProperties": False,
}
GRAMMAR = json_schema_grammar(SCHEMA)
TEXT = tiny_prompt([[1, 2, 3, 4, 5]])
PICTURE = tiny_prompt([[1, 2], tiny_item(1, [8, 6]), [3]])
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 3},
    "full": {"temperature": 1.2, "seed": 5, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    "logprobs": {"temperature": 1.0, "seed": 7, "logprobs": 2},
}


def ask(engine: InlineEngine, name: str, **fields: Any) -> None:
    prompt = fields.pop("prompt", TEXT)
    engine.submit(name, prompt, **{"max_tokens": 150, "stop_token_ids": (END_TOKEN,), **fields})


def text(engine: InlineEngine, name: str) -> str:
    return tiny_text(engine.tokens(name)).decode()


GUIDED: dict[str, dict[str, Any]] = {
    f"{seed}": {"grammar": GRAMMAR, "temperature": 1.0, "seed": seed} for seed in range(4)
}
_ALONE: dict[str, tuple[list[int], str | None]] = {}


def alone(name: str, **fields: Any) -> tuple[list[int], str | None]:
    """Tokens and end of a request that an engine has for itself, eagerly. Remembered, since many tests ask the same."""
    key = repr(sorted((field, value if field != "prompt" else id(value)) for field, value in fields.items()))
    if key not in _ALONE:
        _ALONE[key] = _alone(name, **fields)
    return _ALONE[key]


def _alone(name: str, **fields: Any) -> tuple[list[int], str | None]:
    engine = InlineEngine(graphs=False)
    ask(engine, name, **fields)
    engine.run()
    return engine.tokens(name), engine.finish_reason(name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings", [{}, *(slow(one) for one in ({"num_pages": 44}, {"graphs": False}, {"overlapped": False}))], ids=str
)
def test_guided_and_free_rows_share_steps_and_answer_as_alone(device: str, settings: dict[str, Any]) -> None:
    engine = InlineEngine(device=device, max_running=8, **settings)
    while any(runner.capture_next(idle=True) for runner in engine.worker.graph_runners):
        pass
    asked: dict[str, dict[str, Any]] = {}
    kinds = SAMPLINGS if settings else {kind: SAMPLINGS[kind] for kind in ("greedy", "full")}
    for kind, sampling in kinds.items():
        asked[f"guided {kind}"] = {"grammar": GRAMMAR, **sampling}
        asked[f"free {kind}"] = {"max_tokens": 40, "prompt": PICTURE, **sampling}
    for name, fields in asked.items():
        ask(engine, name, **fields)
        engine.turn()
    engine.run()
    engine.assert_nothing_left()
    assert not engine.failures()
    for name, fields in asked.items():
        assert (engine.tokens(name), engine.finish_reason(name)) == alone(name, **fields), name
        if "guided" in name:
            assert engine.finish_reason(name) == "stop"
            jsonschema.validate(json.loads(text(engine, name)), SCHEMA)
    routes = {route for kind, route in engine.routes() if kind.startswith("guided")}
    assert routes == {"eager" if "graphs" in settings else "replay"}
    if "num_pages" in settings:
        assert engine.counter("preemptions_total") > 0


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_graphs_that_are_captured_between_guided_steps_change_no_answer(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_aside = GraphPool._capture_call

    def run_first(pool: GraphPool, capturable: Capturable, bucket: Bucket, buffers: Mapping[str, Tensor]) -> Capture:
        capturable.forward(buffers, bucket)  # As on a GPU, where every capture runs.
        return set_aside(pool, capturable, bucket, buffers)

    monkeypatch.setattr(GraphPool, "_capture_call", run_first)
    monkeypatch.setattr(service.engine.engine, "MISSES_BEFORE_CAPTURE", 3)
    monkeypatch.setattr(service.engine.engine, "EARLY_CAPTURE_SECONDS", 0.0)
    engine = InlineEngine(device=device, max_running=8)
    asked: dict[str, dict[str, Any]] = {**GUIDED, "full": {"grammar": GRAMMAR, **SAMPLINGS["full"]}}
    for name, fields in asked.items():
        ask(engine, name, **fields)
        engine.turn()
    engine.run()
    for name, fields in asked.items():
        assert (engine.tokens(name), engine.finish_reason(name)) == alone(name, **fields), name
    ways = {(kind, route) for kind, route, _ in engine.steps() if kind.startswith("guided_sample")}
    assert {("guided_sample", "eager"), ("guided_sample", "replay")} <= ways


def test_an_answer_ends_only_where_its_grammar_does() -> None:
    engine = InlineEngine()
    ask(engine, "early", grammar=regex_grammar("[a-z]{7}"), logit_bias={END_TOKEN: 100.0})
    ask(engine, "late", grammar=regex_grammar("[a-z]{3,}"), logit_bias={END_TOKEN: 100.0})
    ask(engine, "deaf", grammar=regex_grammar("[a-z]{3}"), stop_token_ids=())
    ask(engine, "cut", grammar=regex_grammar("[a-z]{30}"), max_tokens=4)
    engine.run()
    lengths = {
        name: (len(engine.tokens(name)), engine.finish_reason(name)) for name in ("early", "late", "deaf", "cut")
    }
    assert lengths == {"early": (7, "stop"), "late": (3, "stop"), "deaf": (3, "stop"), "cut": (4, "length")}


def test_a_dead_end_ends_its_own_row_with_a_reason() -> None:
    """The tiny vocabulary has no '#'."""
    engine = InlineEngine()
    ask(engine, "dead", grammar=lark_grammar('start: "ab#"'))
    ask(engine, "other", grammar=choice_grammar(["yes", "no"]))
    ask(engine, "free", max_tokens=10)
    engine.run()
    engine.assert_nothing_left()
    failed = engine.failures()["dead"]
    assert (failed.status, failed.code) == (400, "grammar_failed") and "no token can follow" in failed.message
    assert text(engine, "other") in ("yes", "no")
    assert engine.tokens("free") == alone("free", max_tokens=10)[0]


def held_builds(monkeypatch: pytest.MonkeyPatch, held: str) -> tuple[threading.Event, threading.Event]:
    """(begun, go on) of the building of the grammar `held`, which waits for the second."""
    begun, goes_on = threading.Event(), threading.Event()
    build = mask_server.build_matcher

    def building(tokenizer: Any, grammar: str) -> Any:
        if grammar == held:
            begun.set()
            assert goes_on.wait(GENEROUS)
        return build(tokenizer, grammar)

    monkeypatch.setattr(mask_server, "build_matcher", building)
    return begun, goes_on


def turns_until(engine: InlineEngine, event: threading.Event) -> None:
    """The mask server may still read the vocabulary: what is asked of it waits for a later turn."""
    wait(lambda: (engine.turn(), event.is_set())[1], what="a grammar that is being built")


def test_no_usual_grammar_waits_for_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, slower = regex_grammar("[a-z]{4}"), regex_grammar("[a-z]{5}")
    begun, goes_on = held_builds(monkeypatch, slow)
    engine = InlineEngine()
    ask(engine, "slow", grammar=slow, slow_grammar=True)
    ask(engine, "slower", grammar=slower, slow_grammar=True)
    turns_until(engine, begun)
    ask(engine, "usual", grammar=choice_grammar(["yes", "no"]))

    def answered(name: str) -> bool:
        engine.turn()
        return engine.finish_reason(name) == "stop"

    wait(lambda: answered("usual"), what="the answer beside a grammar that is being built")
    assert text(engine, "usual") in ("yes", "no")
    assert not engine.tokens("slow") and not engine.tokens("slower")
    goes_on.set()
    engine.run()
    assert (len(text(engine, "slow")), len(text(engine, "slower"))) == (4, 5)


def test_min_tokens_and_a_grammar_exclude_each_other() -> None:
    engine = InlineEngine()
    ask(engine, "both", grammar=GRAMMAR, min_tokens=3)
    engine.run()
    failure = engine.failures()["both"]
    assert failure.field == "min_tokens" and "tools" in failure.message


def test_masks_that_cannot_be_computed_end_the_guided_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ValueError("no masks today")

    engine = InlineEngine()
    ask(engine, "free", max_tokens=20)
    ask(engine, "guided", grammar=GRAMMAR)
    monkeypatch.setattr(mask_server.MaskServer, "_compute", broken)
    engine.run()
    engine.assert_nothing_left()
    assert set(engine.failures()) == {"guided"}
    assert engine.tokens("free") == alone("free", max_tokens=20)[0]
