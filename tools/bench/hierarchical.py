"""Hierarchical beside flat all-reduces, and what the profile's model predicts for them: two nodes of two ranks.

The nodes are network namespaces, joined by a link of limited bandwidth (tbf); the ranks of a node use its loopback.
In every repeat, in alternating order: blocks of flat and of hierarchical all-reduces of each size, through the
engine, by the time of the slowest rank. The predictions get the bandwidth of the link, and from the same repeat the
bandwidth between the ranks of a node and the cost of a message: all-reduces inside both nodes at once.

    python tools/bench/hierarchical.py [--repeats 7] [--mbit 200 1000] [--sizes 1 4 16] [--json]
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from report import Report, make_parser
from shaped_nodes import NUM_NODES, run_ranks, shaped_nodes

from datasvc.trainer.recipes.profiling.predict.cluster import Cluster, Link
from datasvc.trainer.recipes.profiling.predict.collectives import all_ranks, all_reduce_s

RANKS_PER_NODE = 2
FLAT, HIERARCHICAL, INSIDE = "flat", "hierarchical", "inside"


def predict(size_bytes: int, way: str, network: Link, inside_s: float, message_s: float) -> float:
    """Return the predicted seconds of an all-reduce.

    Args:
        size_bytes: size of the tensor.
        way: FLAT or HIERARCHICAL.
        network: link between the nodes.
        inside_s: measured time of an all-reduce of this size between the two ranks of a node.
        message_s: measured time of an all-reduce of one number between them.
    """
    # A ring of two ranks takes bytes / bandwidth; its latency is in `message_s`.
    inside = Link(size_bytes / max(inside_s - message_s, 1e-9))
    links = Cluster(NUM_NODES, network, RANKS_PER_NODE, inside if way == HIERARCHICAL else None, message_s)
    return all_reduce_s(size_bytes, all_ranks(links), links)


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=7)
    parser.add_argument("--mbit", type=int, nargs="+", default=[200, 1000], help="of the link; default: %(default)s")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16], help="in MB; default: %(default)s")
    arguments = parser.parse_args()
    report = Report(f"{NUM_NODES} nodes of {RANKS_PER_NODE} ranks, gloo, one thread a rank")
    program = Path(__file__).with_name("hierarchical_rank.py")
    told = ["--repeats", str(arguments.repeats), "--sizes", *map(str, arguments.sizes)]
    for mbit in arguments.mbit:
        # By way and size, the seconds of each repeat.
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        with shaped_nodes(mbit * 1e6 / 8) as nodes:
            for line in run_ranks(nodes, RANKS_PER_NODE, program, told):
                block = json.loads(line)
                seconds[block["way"], block["bytes"]].append(block["s"])
        add_link(report, mbit, arguments.sizes, seconds)
    report.show(as_json=arguments.as_json)


def add_link(report: Report, mbit: int, sizes_mb: list[int], seconds: dict[tuple[str, int], list[float]]) -> None:
    """Add the times of one link, flat by hierarchical, and predicted by measured."""
    message_s = seconds[INSIDE, 4]
    for size_mb in sizes_mb:
        size, name = size_mb * 1_000_000, f"{mbit} Mbit/s, {size_mb} MB"
        for way in (FLAT, HIERARCHICAL):
            report.add_row(f"{name}: {way}", "ms", [1e3 * value for value in seconds[way, size]])
        report.add_ratio(f"{name}: {FLAT} / {HIERARCHICAL}", seconds[FLAT, size], seconds[HIERARCHICAL, size])
        for way in (FLAT, HIERARCHICAL):
            predicted = [
                predict(size, way, Link(mbit * 1e6 / 8), *measured)
                for measured in zip(seconds[INSIDE, size], message_s, strict=True)
            ]
            report.add_ratio(f"{name}: predicted / measured, {way}", predicted, seconds[way, size])


if __name__ == "__main__":
    main()
