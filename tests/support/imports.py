"""Which modules of the project import which, as their files say."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def modules_of(*packages: str) -> dict[str, Path]:
    """Files of these packages by module."""
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> set[str]:
    """Modules, and names in them, that a file imports anywhere, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def edges(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """By module those of `modules` that it imports."""
    return {module: (imported(path) & modules.keys()) - {module} for module, path in modules.items()}


def rooms_of(package: str, edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """By module or package that is directly in `package`, the others there that it imports."""

    def room(module: str) -> str:
        return ".".join(module.split(".")[: package.count(".") + 2])

    inside = {module: {room(name) for name in names if within(name, package)} for module, names in edges.items()}
    rooms: dict[str, set[str]] = {}
    for module, names in inside.items():
        if within(module, package) and module != package:
            rooms.setdefault(room(module), set()).update(names - {room(module), package})
    return rooms


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def defined(tree: ast.Module) -> set[str]:
    """Names that the statements of a module define, its imports aside."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


def imported_from_elsewhere(modules: Mapping[str, Path]) -> set[str]:
    """Names that are imported from a module that has only imported them itself."""
    trees = {module: parsed(path) for module, path in modules.items()}
    names = {module: defined(tree) for module, tree in trees.items()}
    return {
        f"{module}: {node.module}.{alias.name}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in modules
        for alias in node.names
        if alias.name not in names[node.module] and f"{node.module}.{alias.name}" not in modules
    }


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []
