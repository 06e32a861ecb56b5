"""An origin as a program: it stands before an HTTP store, or serves a folder, and answers as a distant store.

    python -m tools.bench.origin http://127.0.0.1:7480 --per-connection 35MB --latency-ms 20 --total 200MB

Prints `{"url": …}` when it listens. Then it obeys lines on standard input, each answered by one line of JSON:
`counts` gives requests and bytes, `forget` starts counting again. It ends with its standard input.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from datasvc.sizes import parse_size
from tools.bench.origin import FileOrigin, Limits, Origin


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("upstream", help="URL of the store, or a folder")
    parser.add_argument("--per-connection", type=parse_size, help="bytes per second, such as 35MB; default: no limit")
    parser.add_argument("--total", type=parse_size, help="bytes per second of all connections; default: no limit")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="to the first byte of an answer; default: 0")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    options = parser.parse_args()
    limits = Limits(options.per_connection, options.total, options.latency_ms / 1e3)
    serve = Origin if "://" in options.upstream else FileOrigin
    with serve(options.upstream, limits, host=options.host, port=options.port) as origin:
        _say({"url": origin.url})
        for line in sys.stdin:
            _say(_obey(origin, line.strip()))


def _obey(origin: Origin | FileOrigin, command: str) -> dict[str, Any]:
    if command == "counts":
        return origin.counts()
    if command == "forget":
        origin.forget()
        return {}
    return {"error": f"no such command: {command!r}"}


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
