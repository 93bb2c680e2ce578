"""Interfaces of other packages that may change without notice: all are listed, and are what the code takes them for."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from PIL import Image
from prometheus_client import CollectorRegistry, Histogram
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from tests.support.optional import needed


class Interface(NamedTuple):
    package: str
    versions: str
    names: list[str]
    users: list[str]


ROOT = Path(__file__).parents[1]
LISTED = tomllib.loads(Path(__file__).with_name("private_interfaces.toml").read_text())["interface"]
INTERFACES = [Interface(**one) for one in LISTED]
PRODUCT = ("models", "service", "deploy")
MODULES = {"pillow": "PIL"}
OF_PYTHON = {"_exit", "_replace"}
"""os._exit and the _replace of a NamedTuple are documented."""


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """An application."""


def made(kind: str) -> Any:
    """An instance of a class whose attributes exist in instances alone."""
    if kind in ("H11Protocol", "WebSocketsSansIOProtocol"):
        protocol = H11Protocol if kind == "H11Protocol" else WebSocketsSansIOProtocol
        config = Config(nothing, http="h11", log_config=None)
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            return protocol(config, ServerState(), {}, loop)
    if kind == "Image":
        return Image.Image()
    return Histogram("probe", "A probe.", buckets=(1.0,), registry=CollectorRegistry())


def found(name: str) -> Any:
    """What `module:attribute` names; AttributeError or ImportError when there is nothing."""
    module, _, attribute = name.partition(":")
    owner: Any = importlib.import_module(module)
    kind, instance, rest = attribute.partition("().")
    return reduce(getattr, rest.split("."), made(kind)) if instance else reduce(getattr, attribute.split("."), owner)


@pytest.mark.parametrize("interface", INTERFACES, ids=lambda interface: interface.names[0])
def test_the_installed_version_is_one_that_was_tried(interface: Interface) -> None:
    needed(MODULES.get(interface.package, interface.package))
    installed = version(interface.package)
    assert SpecifierSet(interface.versions).contains(installed, prereleases=True), installed


@pytest.mark.parametrize("interface", INTERFACES, ids=lambda interface: interface.names[0])
def test_what_is_listed_exists(interface: Interface) -> None:
    needed(MODULES.get(interface.package, interface.package))
    for name in interface.names:
        if name != "torch:_C._cuda_endAllocateToPool" or importlib.import_module("torch").version.cuda:
            found(name)


def test_the_range_is_the_one_that_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {found.name.replace("-", "_"): found.specifier for found in map(Requirement, project["dependencies"])}
    for interface in INTERFACES:
        if interface.package != "triton":  # torch brings it
            assert asked[interface.package] == SpecifierSet(interface.versions), interface.package


def test_the_page_names_each() -> None:
    page = (ROOT / "docs/private_interfaces.md").read_text()
    for interface in INTERFACES:
        assert f"`{interface.versions}`" in page
        for name in interface.names:
            assert f"`{name.rpartition('.')[2].rpartition(':')[2]}`" in page, name


def test_the_users_are_files_that_use_them() -> None:
    for interface in INTERFACES:
        for user in interface.users:
            texts = [path.read_text() for top in (*PRODUCT, "tests/support") for path in (ROOT / top).rglob(user)]
            assert any(re.search(rf"\b{interface.package}\b", text, re.IGNORECASE) for text in texts), (
                interface.package,
                user,
            )


def names_with_underscores(tree: ast.Module) -> Iterator[str]:
    """Private attributes of anything but self and cls, and private modules and names that are imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] not in PRODUCT:
            yield from (part for part in node.module.split(".") if part.startswith("_"))
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                yield node.attr


@pytest.mark.slow
def test_nothing_private_is_used_that_is_not_listed() -> None:
    listed = {part for interface in INTERFACES for name in interface.names for part in re.split(r"[.:()]+", name)}
    listed |= OF_PYTHON | {"__future__"}
    for path in (path for top in PRODUCT for path in (ROOT / top).rglob("*.py")):
        private = set(names_with_underscores(ast.parse(path.read_text())))
        assert private <= listed, f"{path.relative_to(ROOT)}: {private - listed} is not in docs/private_interfaces.md"


def test_triton_takes_warmup_as_the_precompilation_gives_it() -> None:
    needed("triton")
    jit = importlib.import_module("triton.runtime.jit")
    assert {"grid", "warmup"} <= set(inspect.signature(jit.JITFunction.run).parameters)
