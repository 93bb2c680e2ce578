"""Which network addresses media may be fetched from: a pure function over an explicit list."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

# ipaddress.is_global alone is not enough: Python 3.11 calls 192.0.0.192 (a cloud's metadata service), NAT64 and 6to4
# prefixes of private addresses, site-local addresses and multicast global.
DENIED: tuple[IPv4Network | IPv6Network, ...] = tuple(
    map(
        ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
            *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
            # ::/96 has the unspecified and the loopback address and all IPv4-compatible addresses.
            *("::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/23"),
            *("2001:db8::/32", "2002::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
        ),
    )
)


def is_public(address: str) -> bool:
    """Whether an IPv4 or IPv6 address belongs to the public internet."""
    try:
        parsed: IPv4Address | IPv6Address = ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed.scope_id is not None:
        return False
    return parsed.is_global and not any(parsed in network for network in DENIED if network.version == parsed.version)
