"""Whether the Python packages that a server needs can be imported, and what to do about one that cannot."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def server_version() -> str:
    return version_of("reprise-server") or "0+checkout"


def version_of(package: str) -> str:
    """The installed version; empty where the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


IMPORTED_LATER = ("PIL.Image", "av", "lameenc", "simplejpeg", "tokenizers", "llguidance")
"""Modules that would first be imported in other processes or for the first request."""
OTHERS = ("torch", "zmq", "safetensors", "fastapi", "uvicorn", "websockets", "multipart", "prometheus_client", "jinja2")
"""Further packages that are looked for, but not imported by the check."""
NAMES = {"PIL": "pillow", "yaml": "pyyaml", "zmq": "pyzmq", "multipart": "python-multipart"}
"""Names of packages, by module where the two differ."""


class PackageError(Exception):
    """A package is missing or broken; the message says which, and how to install it."""


def unusable(module: str, error: object) -> str:
    """The message about a module that cannot be imported."""
    name = module.partition(".")[0]
    package = NAMES.get(name, name.replace("_", "-"))
    first = (str(error).splitlines() or ["?"])[0]
    return (
        f"the Python package {package} cannot be imported ({first}); "
        f"install it: {sys.executable} -m pip install --force-reinstall {package}"
    )


def is_ours(error: ImportError) -> bool:
    """Whether it is no other package that cannot be imported, but a part of Reprise."""
    return (error.name or "").partition(".")[0] in ("models", "service")


def check_installed() -> None:
    """Raise PackageError if a package is missing. Nothing is imported."""
    for module in (*IMPORTED_LATER, *OTHERS):
        if find_spec(name := module.partition(".")[0]) is None:
            raise PackageError(unusable(name, "it is not installed"))


def check_importable() -> None:
    """Raise PackageError if a package cannot be imported that a request or another process would import first."""
    for module in IMPORTED_LATER:
        try:
            import_module(module)
        except Exception as error:  # as of a library that is missing
            raise PackageError(unusable(module, error)) from error
