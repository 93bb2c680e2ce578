"""Who may reach the server, and whom it reaches: addresses of this machine, files of API keys, hosts of media."""

from __future__ import annotations

from collections.abc import Iterable
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


def media_hosts_problem(media_urls: str, media_domain: Iterable[str]) -> str:
    """Why the mode of remote URLs and the list of their hosts contradict each other; empty if they do not."""
    listed = any(media_domain)
    if media_urls == "allowlist":
        return "" if listed else "media_urls: allowlist needs a host in media_domain; without one every URL is refused"
    ignored = "every URL is refused" if media_urls == "off" else "URLs of any public host are fetched"
    return f"media_domain: needs media_urls allowlist; with {media_urls} {ignored}, listed or not" if listed else ""
