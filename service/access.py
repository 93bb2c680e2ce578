"""Who may reach the server: addresses that stay on this machine, and files of API keys."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path


def is_loopback(host: str) -> bool:
    """Whether a name or an address to listen on can be reached only from this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def keys_in(path: Path) -> list[str]:
    """The keys in a file, one per line. Empty lines, comments (#) and a byte order mark, as on Windows, do not count.
    ValueError for a file that cannot be read or holds no key."""
    try:
        lines = [line.strip() for line in path.read_text("utf-8-sig").splitlines()]
    except OSError as error:
        raise ValueError(f"api_key_file: {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"api_key_file: {path} is not UTF-8 text") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"api_key_file: {path} holds no key")
    return keys
