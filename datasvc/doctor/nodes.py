"""Checks a node: whether it responds, accepts the token, and has the time of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator

from datasvc.doctor.clocks import examine_clock
from datasvc.doctor.finding import Finding
from datasvc.errors import DatasvcError
from datasvc.node.client import NodeClient


def examine_node(url: str, client: NodeClient) -> Iterator[Finding]:
    """Yield findings on the node at `url`, whose client is `client`."""
    check = f"node {url}"
    try:
        before_s = time.time()
        theirs_s = client.clock_s()
        after_s = time.time()
        client.status()
    except DatasvcError as error:
        yield Finding(check, "problem", str(error), "see `datasvc serve --help`, and the log of that node")
        return
    yield Finding(check, "ok", "responds")
    yield examine_clock(f"{check} clock", before_s, theirs_s, after_s)
