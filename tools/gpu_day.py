"""All that is tested and measured on a GPU, within 15 minutes: what to run first on a machine that has one.

    PYTHONPATH=.:$PYTHONPATH python tools/gpu_day.py OUT [--stage NAME ...] [--total-s 900]
    PYTHONPATH=.:$PYTHONPATH python tools/gpu_day.py OUT --table

Stages run in the order of their value: the first three (tests, loader, ResNet-50 beside synthetic batches) have 8
minutes together. Each stage runs in a process of its own and writes OUT/NAME.json: whether it is done, failed, or
needs a GPU that this machine does not have, with its figures, the device's name and the end of its log. A stage that
was ended by its limit has the figures it has found. The same command continues it with the parts that are not done;
those that are done are kept in OUT/kept, beside the photos. Stages that are done are not run again. Without a GPU
every stage runs on small data up to where it needs one. The exit status is 1 if a stage failed or had no time left.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from gpu_stages.runner import read_outcome, run_stage
from gpu_stages.table import make_table

STAGES: Final[Mapping[str, str]] = {
    "gpu_tests": "Tests marked gpu",
    "loading": "Loader alone, photos of 110 kB",
    "training": "ResNet-50 and AlexNet: synthetic batches, ours, torch's folder",
    "profiling": "Predicted by measured step time on a GPU",
    "saving": "Saves and restores from CUDA",
    "digits": "Digits at fp16 and bf16 to 97 %",
    "ranks": "NCCL at one rank, gloo with CUDA tensors at two",
    "layouts": "Memory of recomputation and offloading, a pipeline of two ranks",
}

# Seconds of each stage: 480 for the first three, 900 in all.
LIMITS_S: Final[Mapping[str, float]] = {
    "gpu_tests": 180,
    "loading": 140,
    "training": 160,
    "profiling": 60,
    "saving": 80,
    "digits": 100,
    "ranks": 80,
    "layouts": 80,
}
# A stage that would get less would end during its start.
_SHORTEST_S: Final = 20.0

# Packages by the modules that are imported of them. Stages run without DALI too, and say so.
_NEEDED: Final[Mapping[str, str]] = {
    **{name: name for name in ("blake3", "cloudpickle", "fsspec", "lmdb", "numpy", "pyarrow", "rich", "safetensors")},
    **{name: name for name in ("tenacity", "torch", "xxhash", "zstandard")},
    "PIL": "pillow",
}
_NEEDED_BY: Final[Mapping[str, Mapping[str, str]]] = {
    "gpu_tests": {
        **{name: name for name in ("pytest", "hypothesis")},
        "pytest_timeout": "pytest-timeout",
        "xdist": "pytest-xdist",
    },
    "digits": {"sklearn": "scikit-learn"},
}


def main() -> None:
    """Run the stages that are not done, or print what was found."""
    arguments = _parse()
    if arguments.list:
        for name, title in STAGES.items():
            print(f"{name:10} {title}")
        return
    outcomes = {name: read_outcome(arguments.out, name) for name in arguments.stage}
    if arguments.table:
        print(make_table([outcome for outcome in outcomes.values() if outcome is not None]))
        return
    if missing := find_missing(arguments.stage):
        sys.exit(
            f"nothing was run: packages that the stages import are not installed: pip install {' '.join(missing)}"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    ends_s, is_cut = time.monotonic() + arguments.total_s, False
    for name, outcome in outcomes.items():
        if outcome is not None and outcome["status"] == "done":
            print(f"{name}: done before", flush=True)
            continue
        left_s = ends_s - time.monotonic()
        if left_s < _SHORTEST_S:
            print(f"{name}: no time left; the same command continues here", flush=True)
            is_cut = True
            continue
        # Seconds that earlier stages did not need go to the last ones.
        limit_s = min(left_s, arguments.limit_s or max(LIMITS_S[name], left_s - sum_after(name, outcomes)))
        outcome = run_stage(name, STAGES[name], arguments.out, limit_s)  # noqa: PLW2901 - the newer one
        outcomes[name] = outcome
        reason = f": {outcome['reason']}" if outcome["reason"] else ""
        print(f"{name}: {outcome['status']} after {outcome['duration_s']:.0f} s{reason}", flush=True)
    sys.exit(is_cut or any(outcome is not None and outcome["status"] == "failed" for outcome in outcomes.values()))


def sum_after(name: str, stages: Iterable[str]) -> float:
    """Return the seconds of the stages that come after `name`."""
    names = list(stages)
    return sum(LIMITS_S[each] for each in names[names.index(name) + 1 :])


def find_missing(stages: Sequence[str]) -> list[str]:
    """Return the packages that are not installed and that these stages import."""
    needed = dict(_NEEDED)
    for stage in stages:
        needed |= _NEEDED_BY.get(stage, {})
    return [package for module, package in needed.items() if find_spec(module) is None]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="folder for a JSON file of each stage; made where missing")
    parser.add_argument("--stage", action="extend", nargs="+", choices=STAGES, help="default: all")
    parser.add_argument("--total-s", type=float, default=900.0, help="of all stages, default: %(default)s")
    parser.add_argument("--limit-s", type=float, help="of each stage, default: its share of --total-s")
    parser.add_argument("--list", action="store_true", help="name the stages")
    parser.add_argument("--table", action="store_true", help="print what was found as Markdown")
    arguments = parser.parse_args()
    if arguments.out is None and not arguments.list:
        parser.error("name a folder for the results")
    arguments.stage = list(dict.fromkeys(arguments.stage or STAGES))
    return arguments


if __name__ == "__main__":
    main()
