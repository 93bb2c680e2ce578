"""Imports run one way: api -> link <- engine -> graphs -> models; no package imports what is built on it, no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("models", "service")
LONGEST_FILE = 400

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
    "service.confined": {"models.errors", "service.confined", "service.children"},
    "service.media": {"models", "service.media", "service.confined"},
}
"""By package: the packages that it may import. What is not listed is the API process and the command line, which may
import all of these but the engine and the graphs."""
ENGINE_SIDE = ("service.engine.", "service.graphs.")
API_SIDE_MAY_IMPORT = {"service.graphs.observations"}
ENGINE_TOOLS = ("service.sizing", "service.tuning")
"""Commands that run the engine's own code in their process: the dry run and the choice of GEMM configurations."""


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def files() -> Iterator[Path]:
    for package in PRODUCT:
        yield from sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Modules of this project that a file imports anywhere, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name for name in found if name.partition(".")[0] in PRODUCT}


def package_of(module: str) -> str:
    """The longest listed package that holds a module; the module itself where none does."""
    holders = [name for name in MAY_IMPORT if module == name or module.startswith(f"{name}.")]
    return max(holders, key=len, default=module)


MODULES = {module_of(path): path for path in files()}


def edges(module: str) -> set[str]:
    return {name for name in imports(MODULES[module]) if name in MODULES and name != module}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_it_is_built_on(package: str) -> None:
    allowed = MAY_IMPORT[package]
    wrong = {
        f"{module} -> {name}"
        for module in MODULES
        if package_of(module) == package
        for name in edges(module) - {"service"}
        if not any(name == other or name.startswith(f"{other}.") for other in allowed)
    }
    assert not wrong


def test_the_api_process_imports_no_engine() -> None:
    wrong = {
        f"{module} -> {name}"
        for module in MODULES
        if package_of(module) == module and module != "service" and not module.startswith(ENGINE_TOOLS)
        for name in edges(module) - API_SIDE_MAY_IMPORT
        if name.startswith(ENGINE_SIDE)
    }
    assert not wrong


def test_no_imports_in_a_circle() -> None:
    graph = {module: edges(module) for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def defined(path: Path) -> set[str]:
    """Names that the statements of a module define, its imports aside."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_names_are_imported_from_the_module_that_defines_them() -> None:
    names = {module: defined(path) for module, path in MODULES.items()}
    wrong = {
        f"{module}: {node.module}.{alias.name}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names
        if alias.name not in names[node.module] and f"{node.module}.{alias.name}" not in MODULES
    }
    assert not wrong


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files()}
    assert not {name: lines for name, lines in long.items() if lines > LONGEST_FILE}
