"""Bytes of a rank at several layouts: parameters, gradients, optimizer state, and the peak of its resident memory.

A GPT with AdamW on four gloo ranks. Bytes of tensors are counted after a step, on the rank that has most; the peak is
that of two steps, above the resident memory before the model was built. Each is compared with `data=4`, in which
every rank has everything (Nichols et al. saw ZeRO at 42 to 66 % of its memory), and with what `plan` estimates. None
of this depends on the load of the machine.

    python tools/bench/layout_memory.py [--repeats 3] [--layers 8] [--width 256] [--tokens 64] [--json] [LAYOUT ...]

A LAYOUT may end with a ZeRO stage: shard=4:2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from report import ROOT, Report, make_parser

NUM_RANKS = 4
WHOLE = "data=4"
LAYOUTS = (
    "shard=4:1",
    "shard=4:2",
    "shard=4:3",
    "data=2,shard=2:1",
    "data=2,shard=2:2",
    "data=2,shard=2:3",
    "tensor=4",
    "pipeline=4",
    "context=4",
    "shard=2,tensor=2:3",
    "shard=2,pipeline=2:3",
    "tensor=2,pipeline=2",
)
# glibc raises these by itself, and then keeps what FSDP frees: the peak would be that of the allocator.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
_STATES = ("parameters", "gradients", "optimizer")


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the bytes of each repeat, by layout and kind."""
    # The ranks must not find this folder's trainer.py where they import the package: -P.
    launch = [sys.executable, "-P", "-m", "datasvc.trainer.launch", "-np", str(NUM_RANKS), "--no-prefix"]
    program = [sys.executable, "-P", str(Path(__file__).with_name("layout_memory_rank.py"))]
    options = [f"--{name}={getattr(arguments, name)}" for name in ("repeats", "layers", "width", "tokens")]
    # Packages may lie in a folder that only PYTHONPATH names.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **_MALLOC}
    command = [*launch, *program, *options, WHOLE, *arguments.layouts]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in map(json.loads, done.stdout.splitlines()):
        layout = line.pop("layout")
        for kind, size_bytes in line.items():
            found[layout][kind].append(size_bytes)
    return found


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--layers", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="of a block; default: %(default)s")
    parser.add_argument("layouts", nargs="*", default=LAYOUTS, metavar="LAYOUT", help="default: twelve")
    arguments = parser.parse_args()
    found = measure(arguments)
    report = Report("Memory of a rank by layout", "estimated: by `python -m datasvc.trainer plan`")

    def states(layout: str, prefix: str = "") -> list[float]:
        kinds = [found[layout][f"{prefix}{kind}"] for kind in _STATES]
        return [sum(sizes) for sizes in zip(*kinds, strict=True)]

    for layout, sizes in found.items():
        for kind in (*_STATES, "peak"):
            report.add_row(f"{layout} {kind}", "MB", [size_bytes / 1e6 for size_bytes in sizes[kind]])
        report.add_ratio(f"{layout} states / {WHOLE}", states(layout), states(WHOLE))
        report.add_ratio(f"{layout} peak / {WHOLE}", sizes["peak"], found[WHOLE]["peak"])
        report.add_ratio(f"{layout} states, estimated / measured", states(layout, "estimated_"), states(layout))
        report.add_ratio(f"{layout} peak, estimated / measured", sizes["estimated_peak"], sizes["peak"])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
