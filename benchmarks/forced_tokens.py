"""How many tokens of an answer its grammar forces, and how much decoding several of them in one step could save. Needs
no GPU.

    python -m benchmarks.forced_tokens

The answers are handwritten for the schema of benchmarks.loads.invoices. The vocabulary has the published size, with
JSON's punctuation and, with `names`, words; without them a name takes several tokens.

`forced`: tokens that follow from what was written before. `saved`: the share of steps that need not run if tokens of a
run are decoded together. The first token of a run gains nothing, since its step is already running when the host learns
that it is forced; without this effect the share would be `bound`. `single`: tokens for which the mask allows no
alternative, so that an answer without such steps would be the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import llguidance
import numpy as np

from benchmarks.checkpoints.tokenizers import PUBLISHED
from benchmarks.loads.invoices import invoice
from benchmarks.measure.record import Row, table, write
from service.api.chat.grammar import json_schema_grammar
from service.engine.chat.matchers import spelled
from service.link.grammar_limits import LIMITS

ANSWERS = 6
LINES = 4
STYLES: dict[str, dict[str, Any]] = {"compact": {"separators": (",", ":")}, "blanks": {}, "indented": {"indent": 2}}
ONE_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""A grammar that leaves no choice of blanks, for comparison: answers in the style "blanks" alone."""
WORDS = (
    "customer date lines article description quantity price unit piece hour box kg paint walls screws blue work site"
)
PUNCTUATION = (
    '":',
    '": "',
    '": ',
    '",',
    '", "',
    '{"',
    '"}',
    "},",
    ": ",
    ", ",
    "}, {",
    "[{",
    "\n  ",
    "\n      ",
    ' "',
    "  ",
)


class Vocabulary:
    """For llguidance.TokenizerWrapper: single bytes, punctuation, words if wanted, and strings of letters up to the
    size."""

    bos_token_id = None

    def __init__(self, size: int, *, words: bool) -> None:
        named = [word for one in WORDS.split() for word in (one, " " + one)] if words else []
        others = (
            "".join(letters) for length in (2, 3, 4) for letters in itertools.product(ascii_lowercase, repeat=length)
        )
        texts = dict.fromkeys(text.encode() for text in itertools.chain(PUNCTUATION, named, others))
        singles = [bytes([value]) for value in range(256)]
        self.tokens = [*singles, *itertools.islice(texts, size - 257), b"<end>"]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [self.eos_token_id]
        self._ids = {text: token for token, text in enumerate(self.tokens[:-1])}

    def __call__(self, text: str | bytes) -> list[int]:
        return spelled(text.encode() if isinstance(text, str) else text, self._ids, 16)


def answers() -> Iterator[Any]:
    dice = random.Random(1)
    for _ in range(ANSWERS):
        lines = [
            {
                "article": f"AB-{dice.randrange(10_000):04d}",
                "description": dice.choice(["blue paint for walls", "a box of screws", "work on site"]),
                "quantity": dice.randrange(1, 1000),
                "price": dice.randrange(1, 99_999) / 100,
                "unit": dice.choice(["piece", "kg", "hour", "box"]),
            }
            for _ in range(LINES)
        ]
        name = dice.choice(["Miller & Sons", "ACME Ltd", "Anna Berg"])
        yield {
            "customer": name,
            "date": f"2026-{dice.randrange(1, 13):02d}-{dice.randrange(1, 29):02d}",
            "lines": lines,
        }


def grammars() -> dict[str, str]:
    schema = invoice()
    schema["properties"]["lines"]["minItems"] = LINES
    usual = json_schema_grammar(schema)
    fixed = json.loads(usual)
    fixed["grammars"][0]["json_schema"]["x-guidance"] = ONE_STYLE
    return {"usual": usual, "one style": json.dumps(fixed)}


def counted(tokenizer: llguidance.LLTokenizer, grammar: str, vocabulary: Vocabulary, text: str) -> np.ndarray:
    """[tokens, forced, runs, sampled, single] of an answer: its tokens where none is forced; where they are, forced
    ones, runs of them, and others. AssertionError where it does not fit."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    rest, forced, runs, sampled, single = text.encode(), 0, 0, 0, 0
    while rest:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        single += int(mask.sum() == 1)
        run = matcher.compute_ff_tokens()
        forced, runs, sampled = forced + len(run), runs + bool(run), sampled + (not run)
        following = run or vocabulary(rest)[:1]
        assert matcher.consume_tokens(following), matcher.get_error()
        rest = rest.removeprefix(b"".join(vocabulary.tokens[token] for token in following))
    return np.array([len(vocabulary(text)), forced, runs, sampled, single])


def measured(size: int, *, words: bool) -> Iterator[Row]:
    vocabulary = Vocabulary(size, words=words)
    slices = llguidance.LLTokenizer.json_slices()
    wrapper = llguidance.TokenizerWrapper(vocabulary)
    tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=vocabulary.eos_token_id, slices=slices)
    for name, grammar in grammars().items():
        for style in STYLES if name == "usual" else ("blanks",):
            texts = [json.dumps(answer, **STYLES[style]) for answer in answers()]
            sums = np.sum([counted(tokenizer, grammar, vocabulary, text) for text in texts], axis=0)
            tokens, forced, runs, sampled, single = sums.tolist()
            saved, bound = 1 - (sampled + runs) / tokens, 1 - sampled / tokens
            shares = {"forced": forced / tokens, "saved": saved, "bound": bound, "single": single / tokens}
            rounded = {key: round(share, 3) for key, share in shares.items()}
            yield {
                "grammar": name,
                "names": "one token" if words else "several",
                "style": style,
                "tokens": tokens,
                **rounded,
            }


def main(size: int = PUBLISHED) -> Path:
    rows = [row for words in (True, False) for row in measured(size, words=words)]
    print(table(rows))
    return write("forced_tokens", rows, vocabulary=size)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
