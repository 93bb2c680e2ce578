"""Imports run one way: api -> link <- engine -> graphs -> models; no package imports what is built on it, no circle."""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.imports import ROOT, circle, edges, imported, imported_from_elsewhere, modules_of, rooms_of, within

LINES = {
    "service": 36_776,
    "service/api": 15_013,
    "service/cli": 2_594,
    "service/confined": 380,
    "service/engine": 9_973,
    "service/graphs": 1_141,
    "service/hub": 506,
    "service/link": 1_188,
    "service/media": 2_682,
    "service/metrics": 561,
    "service/processes": 1_205,
    "service/settings": 494,
    "service/system": 525,
    "models": 21_639,
    "models/checkpoints": 1_620,
    "models/interfaces": 681,
    "models/layers": 10_026,
    "models/minicpmv": 1_649,
    "models/qwen_vl": 1_955,
    "models/text": 961,
    "models/voxcpm2": 2_892,
    "training": 7_960,
    "benchmarks": 8_915,
    "tests": 43_703,
}
"""Budgets: the most lines of Python by room. Lower one where code has gone; to raise one is a decision of its own."""
WORDS = 45_000
"""The most words of README, CHANGELOG and docs."""

FILES = 176
"""The most Python files of service."""

ROOMS = {"service": (16, 42), "service/api": (12, 42), "service/engine": (8, 14), "models": (10, 29)}
"""By package: the most rooms (its modules and packages), and the most pairs of which one imports the other."""

MAY_IMPORT = {
    "models": {"models"},
    "service.graphs": {"models", "service.graphs"},
    "service.link": {"models", "service.graphs", "service.link", "service.system"},
    "service.engine": {"models", "service.graphs", "service.link", "service.engine", "service.system"},
    "service.confined": {"models.interfaces.errors", "service.confined", "service.system"},
    "service.media": {"models", "service.media", "service.confined", "service.system"},
    "service.system": {"service.system"},
    "service.voices": {"models", "service.voices", "service.system"},
    "service.metrics": {"service.metrics", "service.link", "service.graphs.observations"},
}
"""By package: the packages that it may import. What is not listed is the API process and the command line, which may
import all of these but the engine and the graphs."""
ENGINE_SIDE = ("service.engine.", "service.graphs.")
API_SIDE_MAY_IMPORT = {"service.graphs.observations"}
ENGINE_TOOLS = ("service.sizing",)
"""Commands that run the engine's own code in their process: the dry run."""


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


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_are_few_and_import_one_way(package: str) -> None:
    rooms = rooms_of(package.replace("/", "."), imports())
    assert not circle(rooms)
    most_rooms, most_arrows = ROOMS[package]
    assert len(rooms) <= most_rooms
    assert sum(map(len, rooms.values())) <= most_arrows


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


def test_service_keeps_its_number_of_files() -> None:
    assert len(list((ROOT / "service").rglob("*.py"))) <= FILES


def test_the_documentation_keeps_its_budget() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= WORDS
