"""Who counts as one client; the limits themselves are tested with a node, in test_serve.py."""

import pytest

from datasvc.node.http.connection_limit import client_of


@pytest.mark.parametrize(
    ("peername", "client"),
    [
        (("10.1.2.3", 5), "10.1.2.3"),
        (("::ffff:10.1.2.3", 5, 0, 0), "10.1.2.3"),
        (("2001:db8:1:2:3::4", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        ("", ""),
        (None, ""),
    ],
)
def test_a_client_is_an_ipv4_address_or_a_network_of_ipv6(peername, client):
    assert client_of(peername) == client
