"""Imports run one way: api -> link <- engine -> graphs -> models; no package imports what is built on it, no circle."""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.imports import ROOT, circle, edges, imported, imported_from_elsewhere, modules_of, within

LINES = {
    "service": 42_800,
    "service/api": 16_850,
    "service/cli": 3_250,
    "service/engine": 10_600,
    "service/graphs": 1_400,
    "service/link": 1_700,
    "service/media": 3_050,
    "service/processes": 1_350,
    "models": 19_450,
    "models/layers": 8_400,
    "models/voxcpm2": 3_350,
    "training": 6_500,
    "benchmarks": 12_700,
    "tests": 67_400,
}
"""Budgets: the most lines of Python by room. Lower one where code has gone; to raise one is a decision of its own."""
WORDS = 58_400
"""The most words of README, CHANGELOG and docs."""

MAY_IMPORT = {
    "models": {"models"},
    "service.graphs": {"models", "service.graphs"},
    "service.link": {"models", "service.graphs", "service.link", "service.logs", "service.children"},
    "service.engine": {
        "models",
        "service.graphs",
        "service.link",
        "service.engine",
        "service.logs",
        "service.children",
        "service.heap",
    },
    "service.confined": {"models.errors", "service.confined", "service.children", "service.shielded"},
    "service.media": {"models", "service.media", "service.confined", "service.shielded"},
}
"""By package: the packages that it may import. What is not listed is the API process and the command line, which may
import all of these but the engine and the graphs."""
ENGINE_SIDE = ("service.engine.", "service.graphs.")
API_SIDE_MAY_IMPORT = {"service.graphs.observations"}
ENGINE_TOOLS = ("service.sizing", "service.tuning")
"""Commands that run the engine's own code in their process: the dry run and the choice of GEMM configurations."""


def package_of(module: str) -> str:
    """The longest listed package that holds a module; the module itself where none does."""
    holders = [name for name in MAY_IMPORT if within(module, name)]
    return max(holders, key=len, default=module)


MODULES = modules_of("models", "service")


@cache
def imports() -> dict[str, set[str]]:
    """By module those that it imports. All files are parsed for it, but not while tests are collected."""
    return edges(MODULES)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_it_is_built_on(package: str) -> None:
    allowed = MAY_IMPORT[package]
    wrong = {
        f"{module} -> {name}"
        for module in MODULES
        if package_of(module) == package
        for name in imports()[module] - {"service"}
        if not any(within(name, other) for other in allowed)
    }
    assert not wrong


def test_the_api_process_imports_no_engine() -> None:
    wrong = {
        f"{module} -> {name}"
        for module in MODULES
        if package_of(module) == module and module != "service" and not module.startswith(ENGINE_TOOLS)
        for name in imports()[module] - API_SIDE_MAY_IMPORT
        if name.startswith(ENGINE_SIDE)
    }
    assert not wrong


def test_no_imports_in_a_circle() -> None:
    assert not circle(imports())


def test_names_are_imported_from_the_module_that_defines_them() -> None:
    assert not imported_from_elsewhere(MODULES)


def test_nothing_that_serves_imports_training() -> None:
    wrong = {
        f"{module} -> {name}" for module, path in MODULES.items() for name in imported(path) if within(name, "training")
    }
    assert not wrong


@pytest.mark.parametrize("room", LINES)
def test_a_room_keeps_its_budget(room: str) -> None:
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / room).rglob("*.py"))
    assert lines <= LINES[room]


def test_the_documentation_keeps_its_budget() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= WORDS
