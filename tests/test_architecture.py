"""Imports run one way: api -> link <- engine -> graphs -> models; no package imports what is built on it, no circle."""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.imports import ROOT, circle, edges, imported, imported_from_elsewhere, modules_of, within

LONGEST_FILE = 400
MOST_LINES_OF_TRAINING = 6500

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


def test_training_stays_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in modules_of("training").values()) <= MOST_LINES_OF_TRAINING


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES.values()}
    assert not {name: lines for name, lines in long.items() if lines > LONGEST_FILE}
