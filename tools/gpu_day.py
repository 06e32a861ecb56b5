"""All that is tested and measured on a GPU, in stages of a few minutes: what to run first on a machine that has one.

    PYTHONPATH=.:$PYTHONPATH python tools/gpu_day.py OUT [--stage NAME ...] [--limit-s 450]
    PYTHONPATH=.:$PYTHONPATH python tools/gpu_day.py OUT --table

Each stage runs in a process of its own and writes OUT/NAME.json: whether it is done, failed, or needs a GPU that this
machine does not have, with its figures, the device's name and the end of its log. Stages that are done are not run
again, so a day that was interrupted goes on where it was; remove a file to have its stage run again. Without a GPU
every stage runs on small data up to the point where it needs one. The exit status is 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
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
    for name, outcome in outcomes.items():
        if outcome is not None and outcome["status"] == "done":
            print(f"{name}: done before", flush=True)
            continue
        outcome = run_stage(name, STAGES[name], arguments.out, arguments.limit_s)  # noqa: PLW2901 - the newer one
        outcomes[name] = outcome
        reason = f": {outcome['reason']}" if outcome["reason"] else ""
        print(f"{name}: {outcome['status']} after {outcome['duration_s']:.0f} s{reason}", flush=True)
    sys.exit(any(outcome is not None and outcome["status"] == "failed" for outcome in outcomes.values()))


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
    parser.add_argument("--limit-s", type=float, default=450.0, help="of a stage, default: %(default)s")
    parser.add_argument("--list", action="store_true", help="name the stages")
    parser.add_argument("--table", action="store_true", help="print what was found as Markdown")
    arguments = parser.parse_args()
    if arguments.out is None and not arguments.list:
        parser.error("name a folder for the results")
    arguments.stage = list(dict.fromkeys(arguments.stage or STAGES))
    return arguments


if __name__ == "__main__":
    main()
