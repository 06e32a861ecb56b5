"""A cluster of nodes on this machine: as real as the machine allows."""

from tests.cluster.loopback import LoopbackNetwork
from tests.cluster.namespace import RefusedError
from tests.cluster.namespaces import NamespaceNetwork

KINDS = {"namespaces": NamespaceNetwork, "loopback": LoopbackNetwork}


def refusal(folder):
    """Return why this machine allows no namespaces, or None where it does. `folder` is made for the try."""
    folder.mkdir()
    try:
        with NamespaceNetwork(folder, num_nodes=1):
            return None
    except RefusedError as error:
        return str(error)
