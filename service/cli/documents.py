"""Writes docs/settings.md and docs/metrics.md from the code: `python -m service.cli.documents`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from service.cli.setting_texts import choices, panel, shown_default
from service.metrics import GROUPS, PREFIX
from service.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"
FLAG = re.compile(r"--[a-z][a-z-]+")
NOTE = "<!-- Written by `python -m service.cli.documents`; change the code that it is made from. -->"
SETTINGS = f"""# Settings

{NOTE}

Each setting is a flag (`--max-n 4`), a variable (`REPRISE_MAX_N=4`) and a key of the YAML file that `--config` or
`REPRISE_CONFIG` names (`max_n: 4`). Flags override variables, and variables override the file. For several values,
repeat the flag, separate them with spaces in a variable, or write a list in the file. Switches are `--graphs` and
`--no-graphs`. Bytes may be written as `512M` or `4G`; times are in seconds. An unknown key of the file is refused, an
unknown variable is reported. `reprise serve --print-config` prints the result."""
METRICS = f"""# Metrics

{NOTE}

`GET /metrics` is in Prometheus' text format. All times are in seconds. `model` is the first served name of a hosted
model, or `unknown`. If a server has several engines (`--gpus`), the metrics of an engine (steps, graphs, caches, load,
starts, its process) have the label `engine`, its index from 0. Histograms have the suffixes `_bucket`, `_count` and
`_sum`; they are classic ones, since the client library does not support native histograms. The usual `process_*` and
`python_*` metrics are there, too. [operation.md](operation.md#watching) says what to look at, and describes the
alerts."""


def settings_page() -> str:
    """Every setting by panel, as Markdown."""
    lines = [SETTINGS]
    panels = dict.fromkeys(panel(name) for name in Settings.model_fields)
    for title in panels:
        lines += ["", f"## {title}", "", "| setting | default | meaning |", "|---|---|---|"]
        for name, field in Settings.model_fields.items():
            if panel(name) == title:
                lines.append(
                    f"| `{name}` | {_default(name)} | {_cell(f'{field.description} {_choices(field.annotation)}')} |"
                )
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Every metric by group, as Markdown."""
    lines = [METRICS]
    for title, specs in GROUPS.items():
        lines += ["", f"## {title}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
        for spec in specs:
            labels = ", ".join(f"`{label}`" for label in spec.labels)
            lines.append(f"| `{PREFIX}_{spec.name}` | {spec.kind} | {labels} | {_cell(spec.help)} |")
    lines += ["", "## Buckets", ""]
    shapes: dict[tuple[float, ...], list[str]] = {}
    for spec in (spec for specs in GROUPS.values() for spec in specs if spec.buckets):
        shapes.setdefault(spec.buckets, []).append(f"`{PREFIX}_{spec.name}`")
    lines += [f"- {', '.join(f'{edge:g}' for edge in edges)}: {', '.join(names)}" for edges, names in shapes.items()]
    return "\n".join(lines) + "\n"


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page}


def _default(name: str) -> str:
    value = shown_default(name)
    is_word = not value or isinstance(Settings.model_fields[name].get_default(), bool)
    return value if is_word else f"`{value}`"


def _choices(annotation: Any) -> str:
    values = [f"`{value}`" for value in choices(annotation)]
    if int in get_args(annotation) and values:
        return f"A number, or {', '.join(values)}."
    return f"One of {', '.join(values)}." if values else ""


def _cell(text: str) -> str:
    return FLAG.sub(r"`\g<0>`", text.strip()).replace("|", "\\|")


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())


if __name__ == "__main__":
    main()
