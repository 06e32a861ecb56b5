"""The bridge that joins the nodes, and its way to this machine."""

import secrets
from contextlib import ExitStack, suppress

from tests.cluster.namespace import Namespace, RefusedError, run

# RFC 2544 keeps 198.18.0.0/15 for tests of networks: no real host has an address there.
_NUM_SUBNETS = 1 << 13
_HOSTS_PER_SUBNET = 16
MAX_NODES = 12
_TRIES = 20


class Switch:
    """The bridge between the nodes and, by one link, this machine's own network."""

    def __init__(self):
        self._outside = f"ds-{secrets.token_hex(4)}"

    def boot(self):
        """Make it. Raises RefusedError."""
        self._space = Namespace()
        with ExitStack() as stack:
            stack.callback(self.close)
            self._space.configure("link add name bridge type bridge", "link set dev bridge up")
            link = f"link add name {self._outside} type veth peer name origin netns {self._space.pid}"
            run(["ip", *link.split()])
            self._space.configure("link set dev origin master bridge", "link set dev origin up")
            self._claim_subnet()
            stack.pop_all()

    def close(self):
        """Drop it with its links."""
        # They would go with the namespace, but some time after it.
        with suppress(RefusedError):
            run(["ip", "link", "delete", "dev", self._outside])
        self._space.close()

    def address(self, host):
        """Return the address of a host of this network, from 1."""
        number = self._subnet * _HOSTS_PER_SUBNET + host
        return f"198.{18 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"

    def plug(self, port, space, host):
        """Connect a node's namespace by a link "eth0" with the address of that host. Raises RefusedError."""
        self._space.configure(
            f"link add name {port} type veth peer name eth0 netns {space.pid}",
            f"link set dev {port} master bridge",
            f"link set dev {port} up",
        )
        space.configure(f"address add {self.address(host)}/28 dev eth0", "link set dev eth0 up")

    def unplug(self, port):
        """Cut a link; its node gets and sends nothing from here on. Harmless where there is none."""
        with suppress(RefusedError):
            self._space.configure(f"link delete dev {port}")

    def limit(self, port, rate):
        """Let `rate` bytes per second out of a port, or everything where that is None."""
        self._space.limit(port, rate)

    def _claim_subnet(self):
        # A route is made once only: whoever made it has the subnet, so runs at the same time get different ones.
        run(["ip", "link", "set", "dev", self._outside, "up"])
        for attempt in range(_TRIES):
            self._subnet = secrets.randbelow(_NUM_SUBNETS)
            try:
                run(["ip", "route", "add", f"{self.address(0)}/28", "dev", self._outside])
            except RefusedError:
                if attempt == _TRIES - 1:
                    raise
                continue
            run(["ip", "address", "add", f"{self.address(1)}/32", "dev", self._outside])
            return
