"""Whether the Python packages that a server needs can be imported, and what to do about one that cannot."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from service.system.children import python_environment


def server_version() -> str:
    return version_of("reprise-server") or "0+checkout"


def version_of(package: str) -> str:
    """The installed version; empty where the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


IMPORTED_LATER = ("PIL.Image", "av", "lameenc", "simplejpeg", "tokenizers", "llguidance")
"""Modules that are first imported in other processes or for the first request."""
OTHERS = ("torch", "zmq", "safetensors", "fastapi", "uvicorn", "websockets", "multipart", "prometheus_client", "jinja2")
"""Further packages that are looked for, but not imported beside the server."""
NAMES = {"PIL": "pillow", "yaml": "pyyaml", "zmq": "pyzmq", "multipart": "python-multipart"}
"""Names of packages, by module where the two differ."""
_TRY = """
import sys
for name in sys.argv[1:]:
    try:
        __import__(name)
    except Exception as error:
        sys.exit(name.partition(".")[0] + "\\n" + str(error))
"""


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


def begin_check() -> subprocess.Popen[str]:
    """Start to import what is needed later, in a process beside this one, which then need not hold it."""
    command = [sys.executable, "-P", "-c", _TRY, *IMPORTED_LATER]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=python_environment())


def end_check(check: subprocess.Popen[str]) -> None:
    """Raise PackageError if a package cannot be imported."""
    _, said = check.communicate()
    if check.returncode:
        module, _, error = said.partition("\n")
        raise PackageError(unusable(module, error))
