"""Which modules of the project import which, as their files say."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


def modules_of(*packages: str) -> dict[str, Path]:
    """Files of these packages by module."""
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


class Names(NamedTuple):
    """What a file imports anywhere, inside functions too, and what its statements define."""

    modules: set[str]
    members: set[tuple[str, str]]
    """Modules, and what is imported from them."""
    defined: set[str]


@cache
def names_of(path: Path) -> Names:
    """No tree is kept: hundreds of them would be looked through at each collection of garbage."""
    names = Names(set(), set(), set())
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                names.defined.add(name)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.defined.add(node.name)
            case ast.Import():
                names.modules.update(alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                names.members.update((module, alias.name) for alias in node.names)
    return names


@cache
def imported(path: Path) -> set[str]:
    """Modules, and names in them, that a file imports."""
    modules, members, _ = names_of(path)
    return modules | {module for module, _ in members} | {f"{module}.{name}" for module, name in members}


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


def imported_from_elsewhere(modules: Mapping[str, Path]) -> set[str]:
    """Names that are imported from a module that has only imported them itself."""
    names = {module: names_of(path) for module, path in modules.items()}
    return {
        f"{user}: {module}.{name}"
        for user in modules
        for module, name in names[user].members
        if module in modules and name not in names[module].defined and f"{module}.{name}" not in modules
    }


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []
