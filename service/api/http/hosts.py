"""Checks the Host header, against DNS rebinding: a web page can make its own domain resolve to an address of the
reader's machine. Its requests then look like requests of the same origin; only the name in Host is foreign."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.datastructures import Headers

from service.api.http.errors import ApiError

ANY = "*"


class HostRule:
    """Accepts loopback names, the bound address and the allowed hosts.

    bound: address or name that the server is bound to. When it is bound to all addresses (0.0.0.0), any IP address in
    Host is accepted: only names can be rebound. keyed: the server requires API keys. A foreign page has none, so all
    hosts are accepted unless `allowed` lists some.
    """

    def __init__(self, bound: str, allowed: Collection[str], *, keyed: bool) -> None:
        self._active = ANY not in allowed and (bool(allowed) or not keyed)
        self._names = {"localhost", *map(host_of, (bound, *allowed))}
        address = _address(bound)
        self._any_address = address is not None and address.is_unspecified

    def check(self, headers: Headers) -> None:
        """ApiError 421 for a host that is not accepted. A request without a Host header is accepted: browsers send
        one."""
        value = headers.get("host")
        if not self._active or value is None:
            return
        host = host_of(value)
        if host in self._names:
            return
        address = _address(host)
        if address is not None and (self._any_address or address.is_loopback):
            return
        message = "Host: this host name is not allowed; the operator can add it to the setting allowed_host."
        raise ApiError(421, message, code="host_not_allowed")


def host_of(value: str) -> str:
    """The name or address in a Host header, without its port, in lower case."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    name, _, _ = value.partition(":") if value.count(":") == 1 else (value, "", "")
    return name.removesuffix(".")


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
