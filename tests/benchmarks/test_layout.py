"""What lies directly in benchmarks is a command; packages hold what commands use, and import none of them."""

from __future__ import annotations

import ast

import pytest

from tests.support.imports import ROOT, circle, edges, imported_from_elsewhere, modules_of, within

MODULES = modules_of("benchmarks")
EDGES = edges(MODULES)
INDEX = {"benchmarks", "benchmarks.__main__", "benchmarks.commands"}
TOP = {name for name in MODULES if name.count(".") == 1} - INDEX
PACKAGES = {name for name in TOP if MODULES[name].name == "__init__.py"}
COMMANDS = sorted(TOP - PACKAGES)

MAY_IMPORT = {
    "benchmarks.measure": set(),
    "benchmarks.checkpoints": set(),
    "benchmarks.servers": {"benchmarks.measure"},
    "benchmarks.loads": {"benchmarks.measure", "benchmarks.servers"},
    "benchmarks.steps": {"benchmarks.measure", "benchmarks.checkpoints"},
    "benchmarks.roofline": {"benchmarks.checkpoints", "benchmarks.steps"},
    "benchmarks.kernels": {"benchmarks.measure", "benchmarks.roofline", "benchmarks.steps"},
    "benchmarks.peers": {"benchmarks.commands", "benchmarks.measure", "benchmarks.checkpoints", "benchmarks.loads"},
    "benchmarks.report": {"benchmarks.commands", "benchmarks.measure", "benchmarks.roofline"},
}
"""By package: what it may import of benchmarks beside itself."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_how_it_is_run(command: str) -> None:
    source = MODULES[command].read_text()
    assert f"python -m {command}" in (ast.get_docstring(ast.parse(source)) or "")
    assert 'if __name__ == "__main__":' in source


def test_the_readme_says_what_is_where() -> None:
    assert MAY_IMPORT.keys() == PACKAGES
    section = (ROOT / "benchmarks/README.md").read_text().partition("\n## What is where\n")[2].partition("\n## ")[0]
    named = [*(f"{name}/" for name in PACKAGES), *COMMANDS]
    assert not [name for name in named if f"`{name.removeprefix('benchmarks.')}`" not in section]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_it_is_built_on(package: str) -> None:
    wrong = {
        f"{module} -> {name}"
        for module in MODULES
        if within(module, package)
        for name in EDGES[module] - {"benchmarks"}
        if not any(within(name, other) for other in {package, *MAY_IMPORT[package]})
    }
    assert not wrong


def test_no_imports_in_a_circle() -> None:
    assert not circle(EDGES)


def test_names_are_imported_from_the_module_that_defines_them() -> None:
    assert not imported_from_elsewhere(MODULES)
