"""The cluster that tests run on, and word at the end of the run of what it was made of."""

import pytest

from tests.cluster.network import KINDS, refusal
from tests.said import say
from tests.support import servers

NUM_NODES = 4


@pytest.fixture(scope="session")
def why_no_namespaces(tmp_path_factory):
    """What this machine refuses of network namespaces, or None where it allows them."""
    return servers.REPLACED if servers.are_replaced() else refusal(tmp_path_factory.mktemp("try") / "network")


@pytest.fixture
def network(request, tmp_path, why_no_namespaces):
    """Four nodes that are up: namespaces where the machine allows them, else processes on loopback.

    A test may ask for a kind by its name: `@pytest.mark.parametrize("network", ["loopback"], indirect=True)`.
    """
    kind = getattr(request, "param", "loopback" if why_no_namespaces else "namespaces")
    if kind == "namespaces" and why_no_namespaces:
        pytest.skip(f"no network namespaces here: {why_no_namespaces}")
    folder = tmp_path / "nodes"
    folder.mkdir()
    with KINDS[kind](folder, NUM_NODES) as network:
        why = f" ({why_no_namespaces})" if why_no_namespaces else ""
        say(f"cluster tests ran on {NUM_NODES} nodes: {network.kind}{why}")
        yield network


@pytest.fixture
def separate_network(network):
    """The network where it can be cut and slowed; skips elsewhere."""
    if not network.is_separate:
        pytest.skip(f"{network.kind} cannot be cut off from each other")
    return network
