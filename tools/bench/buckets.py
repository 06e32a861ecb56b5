"""Buckets whose size `bucket_bytes="auto"` chooses, beside a grid of sizes: two nodes of one rank, and a slow link.

The nodes are network namespaces, joined by a link of limited bandwidth (tbf). A step has gradients of ResNet-18's
sizes (46 MB), and a backward pass that sleeps for each convolution: the processor is free, as if a GPU computed. In
every repeat, in alternating order: a block of steps with each size of the grid, and one with the size that "auto" has
chosen, by the time of the slower rank. Ratios are within each repeat: "grid / auto" above 1 means that the chosen
size is faster. The best of the grid is the one with the lowest median.

    python tools/bench/buckets.py [--repeats 7] [--mbit 1000] [--backward-ms 300] [--steps 4] [--json]
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

from report import Report, make_parser
from shaped_nodes import NUM_NODES, run_ranks, shaped_nodes

AUTO = "auto"
GRID_MIB = (0.5, 1, 2, 4, 8, 16, 25, 64)


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=7)
    parser.add_argument("--mbit", type=int, default=1000, help="of the link; default: %(default)s")
    parser.add_argument("--backward-ms", type=float, default=300, help="of a step; default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="of a block; default: %(default)s")
    parser.add_argument("--grid", type=float, nargs="+", default=GRID_MIB, help="in MiB; default: %(default)s")
    arguments = parser.parse_args()
    told = ["--repeats", str(arguments.repeats), "--backward-ms", str(arguments.backward_ms)]
    told += ["--steps", str(arguments.steps), "--grid", *map(str, arguments.grid)]
    seconds: dict[str, list[float]] = defaultdict(list)
    note = ""
    with shaped_nodes(arguments.mbit * 1e6 / 8) as nodes:
        for line in run_ranks(nodes, 1, Path(__file__).with_name("buckets_rank.py"), told):
            block = json.loads(line)
            if "note" in block:
                note = block["note"]
            else:
                seconds[block["size"]].append(block["s"])
    report = Report(f"{NUM_NODES} nodes of 1 rank, {arguments.mbit} Mbit/s, one thread a rank", note)
    for size, values in seconds.items():
        report.add_row(f"{size}", "ms/step", [1e3 * value for value in values])
    grid = {size: values for size, values in seconds.items() if size != AUTO}
    for size, values in grid.items():
        report.add_ratio(f"{size} / {AUTO}", values, seconds[AUTO])
    best = min(grid, key=lambda size: statistics.median(grid[size]))
    report.add_ratio(f"{AUTO} / best of the grid, {best}", seconds[AUTO], grid[best])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
