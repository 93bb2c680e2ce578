"""What lies directly in benchmarks is a command; packages hold what commands use, and import none of them."""

from __future__ import annotations

import ast
import runpy
import sys
from functools import cache

import pytest

from tests.support.imports import ROOT, circle, edges, imported_from_elsewhere, modules_of, within

MODULES = modules_of("benchmarks")
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


RUNNABLE = sorted(
    module.removesuffix(".__main__")
    for module, path in MODULES.items()
    if 'if __name__ == "__main__":' in path.read_text()
    and not within(module, "benchmarks.servers")  # run with the flags of `reprise serve`, or by other commands
)


@cache
def imports() -> dict[str, set[str]]:
    """By module those that it imports. All files are parsed for it, but not while tests are collected."""
    return edges(MODULES)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_how_it_is_run(command: str) -> None:
    source = MODULES[command].read_text()
    assert f"python -m {command}" in (ast.get_docstring(ast.parse(source)) or "")
    assert 'if __name__ == "__main__":' in source


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", RUNNABLE)
def test_a_command_prints_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU, and in this process, since one of its own would import torch anew."""
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module(command, run_name="__main__")
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


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
        for name in imports()[module] - {"benchmarks"}
        if not any(within(name, other) for other in {package, *MAY_IMPORT[package]})
    }
    assert not wrong


def test_no_imports_in_a_circle() -> None:
    assert not circle(imports())


def test_names_are_imported_from_the_module_that_defines_them() -> None:
    assert not imported_from_elsewhere(MODULES)
