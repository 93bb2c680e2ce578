"""What fits on which card, by the code of `reprise serve --dry-run`; without a GPU.

python -m benchmarks.cards

A row for each model of the tables of docs/operation.md and docs/quantization.md in each form: weights in bytes, and the
positions of the KV cache with the default settings on each card where a start would not fail.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.checkpoints.published import SIZES, make
from benchmarks.measure.record import Row, record
from service.settings.settings import load_settings
from service.tuning.sizing import size

CARDS = {8: 7.8, 12: 11.7, 16: 15.7, 24: 23.6, 80: 79.2}
"""GiB that a card gives to programs, by the GB of its name."""
FORMS: dict[str, tuple[str | None, str]] = {
    "bfloat16": (None, "none"),
    "fp8": (None, "fp8"),
    "published FP8": ("fp8", "none"),
    "4 bits": ("awq", "none"),
    "4 bits and fp8": ("awq", "fp8"),
}
"""Form of the checkpoint (benchmarks.checkpoints.quantised), and the setting `quantization`."""


ON_CARDS = ("bfloat16", "published FP8", "4 bits")


def card_bytes(card: int) -> int:
    return round(CARDS[card] * 2**30)


def row_of(name: str, form: str) -> Row:
    """Of a model of SIZES in a form of FORMS. Cards are tried for the forms of ON_CARDS, unless the weights alone fill
    them."""
    published, quantization = FORMS[form]
    with TemporaryDirectory() as folder:
        directory = make(name, Path(folder), published)
        settings = load_settings({"model": [str(directory)], "quantization": quantization})
        runs = {max(CARDS): size(settings, str(card_bytes(max(CARDS))))}
        model = runs[max(CARDS)].models[0]
        if form in ON_CARDS:
            fitting = [card for card in CARDS if card not in runs and model.weights < card_bytes(card)]
            runs |= {card: size(settings, str(card_bytes(card))) for card in fitting}
    positions = {str(card): run.models[0].positions for card, run in sorted(runs.items()) if run.refusal is None}
    return {"model": name, "form": form, "weights": model.weights, "context": model.context, "positions": positions}


def rows() -> Iterator[tuple[Row, dict[str, Any]]]:
    for name in SIZES:
        if not name.startswith(("qwen3_asr", "qwen3_aligner")):
            for form in FORMS if name != "voxcpm2" else ["bfloat16"]:
                yield row_of(name, form), {"gib": CARDS}


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cards", description=__doc__)
    parser.parse_args(words)
    return record("cards", rows())


if __name__ == "__main__":
    main()
