"""Which addresses are on the public internet."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.media.fetch import DENIED, is_public


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "0.0.0.0", "10.1.2.3", "100.64.0.1", "169.254.169.254", "172.31.255.255", "192.0.0.192"),
        *("192.168.1.1", "198.19.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "::ffff:8.8.8.8"),
        *("::ffff:127.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::1", "2002:7f00:1::", "fc00::1", "fe80::1", "fe80::1%eth0"),
        *("fec0::1", "ff02::1", "2001:db8::1", "2001::1", "2606:4700::1%1", "", "localhost", "2130706433", "0x7f.1"),
    ],
)
def test_refused(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::", "2a00:1450:4001::200e", "172.32.0.1"])
def test_allowed(address: str) -> None:
    assert is_public(address)


@given(st.sampled_from(DENIED), st.data())
def test_every_address_of_a_denied_network_is_refused(network, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, network.num_addresses - 1))
    assert not is_public(str(network[offset]))


@given(st.integers(0, 2**32 - 1).map(IPv4Address) | st.integers(0, 2**128 - 1).map(IPv6Address))
def test_agrees_with_the_list_and_with_ipaddress(address: IPv4Address | IPv6Address) -> None:
    listed = any(address in network for network in DENIED if network.version == address.version)
    assert is_public(str(address)) == (not listed and address.is_global)


@given(st.integers(0, 2**32 - 1))
def test_no_ipv4_address_gets_through_as_an_ipv6_one(packed: int) -> None:
    for prefix in (0, 0xFFFF << 32, int(ip_address("64:ff9b::"))):
        assert not is_public(str(IPv6Address(prefix | packed)))
