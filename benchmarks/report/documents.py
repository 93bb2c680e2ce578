"""Regions of documents, which the tables and plots of benchmarks/results fill, and which of them are out of date."""

from __future__ import annotations

import os
import re
from pathlib import Path

from benchmarks.report.plots import PLOTS, Plot, digest, draw
from benchmarks.report.results import Missing, Results
from benchmarks.report.tables import TABLES

ROOT = Path(__file__).parents[2]
IMAGES = Path("docs/images")
_REGION = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- /figures -->)", re.S)


def documents(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "benchmarks").glob("*.md")), *sorted((root / "docs").glob("*.md"))]


def images_from(document: Path, root: Path) -> str:
    """The folder of the plots as a document links to it."""
    return os.path.relpath(root / IMAGES, document.parent)


def filled(text: str, results: Results, images: str = "images") -> str:
    """`text` with every region replaced. images: see images_from. Raises KeyError for a region of an unknown name."""

    def content(name: str) -> str:
        if name in PLOTS:
            return _image(PLOTS[name], results, images)
        return TABLES[name](results)

    return _REGION.sub(lambda match: f"{match[1]}{content(match[2])}\n{match[3]}", text)


def _image(plot: Plot, results: Results, images: str) -> str:
    try:
        plot.series(results)
    except Missing as missing:
        return f"No plot yet: {missing}."
    return f"![{plot.caption}]({images}/{plot.name}.svg)"


def _updated(document: Path, root: Path, results: Results) -> str:
    return filled(document.read_text(), results, images_from(document, root))


def stale(root: Path, results: Results) -> list[Path]:
    """Documents and plots that do not match the results."""
    found = [path for path in documents(root) if _updated(path, root, results) != path.read_text()]
    for plot in PLOTS.values():
        path = root / IMAGES / f"{plot.name}.svg"
        text = path.read_text() if path.exists() else ""
        try:
            current = digest(plot.series(results)) in text
        except Missing:
            current = not text
        if not current:
            found.append(path)
    return found


def write(root: Path, results: Results) -> list[Path]:
    """Brings everything up to date; returns what was changed."""
    changed = stale(root, results)
    for path in changed:
        if path.suffix == ".md":
            path.write_text(_updated(path, root, results))
            continue
        try:
            draw(PLOTS[path.stem], results, path)
        except Missing:
            path.unlink()
    return changed
