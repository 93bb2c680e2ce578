"""Who may reach the server, and whom it reaches: addresses of this machine, files of API keys, hosts of media."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path


def no_space(error: OSError) -> bool:
    """Whether the error means that no space is left: on the device, in the quota, or within the limit of file sizes."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


_MEDIA_HOST = re.compile(r"[a-z0-9._-]+(?::([0-9]{1,5}))?", re.ASCII | re.IGNORECASE)
"""A name or an IPv4 address, and a port."""


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
    """Why the mode of remote URLs and the list of their hosts contradict each other, or what in the list is no host;
    empty if nothing is wrong."""
    listed = [*filter(None, media_domain)]
    if media_urls != "allowlist" and listed:
        ignored = "every URL is refused" if media_urls == "off" else "URLs of any public host are fetched"
        return f"media_domain: needs media_urls allowlist; with {media_urls} {ignored}, listed or not"
    if media_urls == "allowlist" and not listed:
        return "media_urls: allowlist needs a host in media_domain; without one every URL is refused"
    if (wrong := next((entry for entry in listed if not _is_media_host(entry)), None)) is not None:
        form = "HOST or HOST:PORT" if wrong.isascii() else "HOST or HOST:PORT in ASCII, as in xn--bcher-kva.example"
        return f"media_domain: {wrong!r} is not {form}; no URL would have it as its host"
    return ""


def _is_media_host(entry: str) -> bool:
    """Whether a URL may have the entry as its host, or as host and port (service.media.fetch)."""
    if found := _MEDIA_HOST.fullmatch(entry):
        return 0 < int(found[1] or 443) < 1 << 16
    with suppress(ValueError):
        return ip_address(entry).version == 6
    return False
