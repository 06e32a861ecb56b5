"""Addresses at which other hosts reach the launcher."""

import socket

import pytest

from datasvc.trainer.launch.ranks.job import RemoteSettings
from datasvc.trainer.launch.ranks.remote_guard import choose_address, find_interface
from datasvc.trainer.launch.ranks.store import list_addresses, open_listener, plan_interfaces
from tests.support.ports import reserved_ports


def test_addresses_are_this_machines_without_repetition_and_loopback_last():
    addresses = list_addresses(["127.0.0.1", "127.0.0.1", "no-such-host.invalid"], [])
    assert "127.0.0.1" in addresses
    assert len(set(addresses)) == len(addresses)
    assert [a.startswith("127.") for a in addresses] == sorted(a.startswith("127.") for a in addresses)
    for address in addresses:
        socket.create_server((address, 0)).close()


def test_a_chosen_interface_gives_the_only_address_and_is_set_for_gloo_and_nccl():
    assert list_addresses(["127.0.0.1"], ["lo"]) == ("127.0.0.1",)
    variables = plan_interfaces(RemoteSettings(network_interfaces=("lo", "eth7")), (), {})
    assert variables == {"GLOO_SOCKET_IFNAME": "lo,eth7", "NCCL_SOCKET_IFNAME": "lo,eth7"}


def test_an_interface_that_is_not_there_is_an_error_that_names_those_that_are():
    with pytest.raises(ValueError, match=r"network interface none7 has no IPv4 address: .*; use one of .*lo"):
        list_addresses([], ["none7"])


def test_gloo_keeps_the_interface_that_the_user_chose():
    addresses = list_addresses([], [])
    assert plan_interfaces(RemoteSettings(), addresses, {"GLOO_SOCKET_IFNAME": "x"}) == {}
    assert plan_interfaces(RemoteSettings(), ["127.0.0.1"], {}) == {}
    assert find_interface("203.0.113.7") is None


def test_the_first_address_that_answers_is_taken():
    with open_listener(2, for_other_hosts=True) as listener:
        port = listener.getsockname()[1]
        assert choose_address(["127.0.0.1"], port) == ("127.0.0.1", "127.0.0.1")
        with open_listener(2, for_other_hosts=False) as here_only:
            # No one listens at the second loopback address.
            assert choose_address(["127.0.0.2", "127.0.0.1"], here_only.getsockname()[1])[0] == "127.0.0.1"


def test_the_error_of_a_port_that_is_not_reachable_has_advice():
    message = "cannot reach the launcher's port .* at 127.0.0.1, 127.0.0.2 .*--network-interface"
    with reserved_ports(1) as (port,), pytest.raises(ValueError, match=message):
        choose_address(["127.0.0.1", "127.0.0.2"], port)
