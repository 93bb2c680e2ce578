"""Versions of installed packages; a module of its own, so that a command that prints one loads no server."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def server_version() -> str:
    return version_of("reprise-server") or "0+checkout"


def version_of(package: str) -> str:
    """The installed version; empty where the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
