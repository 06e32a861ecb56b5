"""Training programs that share their decoding, beside as many that do not: whole commands, from start to exit.

Each run is `python -m datasvc.trainer` with one rank and one compute thread, as in a search over learning rates. All
runs of a repeat start together. Figures are the seconds until the last run has ended, imports of torch and the last
checkpoint included, and the processor seconds of all runs. Ratios are separate / sharing. The default model is
linear: it leaves the processors to decoding, as a model on an accelerator does. `--model small-cnn` uses them too.

    python tools/bench/shared_training.py [--repeats 3] [--runs 4] [--images 3000] [--epochs 16] [--batch 64]
                                          [--size 64] [--threads 1] [--model MODEL] [--folder FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from photos import write_photos
from report import ROOT, Report, alternate, make_parser

import datasvc

SHARING, SEPARATE = "sharing", "separate"


def run_programs(folder: Path, settings: argparse.Namespace, *, is_shared: bool) -> tuple[float, float]:
    """Return the seconds until all runs have ended, and the processor seconds that they used."""
    group = f"bench-{secrets.token_hex(4)}"
    options = {
        "--data": "photos@1",
        "--repo": folder / "repository",
        "--model": settings.model,
        "--epochs": settings.epochs,
        "--batch-size": settings.batch,
        "--size": settings.size,
        "--decode-threads": settings.threads,
    }
    if is_shared:
        options["--decode-group"] = group
    # The programs must not find this folder's trainer.py where they import the package: -P.
    command = [
        sys.executable,
        "-P",
        "-m",
        "datasvc.trainer",
        *(str(word) for pair in options.items() for word in pair),
    ]
    path = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    started_s = time.perf_counter()
    runs = [
        subprocess.Popen(
            [*command, "--name", f"{group}-{number}", "--learning-rate", str(0.01 * (number + 1))],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for number in range(settings.runs)
    ]
    processor_s = 0.0
    for run in runs:
        _, status, usage = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
        processor_s += usage.ru_utime + usage.ru_stime
    if any(run.returncode for run in runs):
        sys.exit("a run failed; see above")
    return time.perf_counter() - started_s, processor_s


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="for decoding, in each run; default: %(default)s")
    parser.add_argument("--model", default="linear_model:linear", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="to work in; default the folder for temporary files")
    arguments = parser.parse_args()
    processor_s: dict[str, list[float]] = {SHARING: [], SEPARATE: []}
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="datasvc-bench-") as name:
        folder = Path(name)
        size_bytes = write_photos(folder / "photos", num_images=arguments.images)
        datasvc.open(str(folder / "repository"), create=True).datasets.ingest(str(folder / "photos"), "photos")

        def time_runs(way: str) -> float:
            elapsed_s, used_s = run_programs(folder, arguments, is_shared=way == SHARING)
            processor_s[way].append(used_s)
            return elapsed_s

        elapsed_s = alternate({way: lambda way=way: time_runs(way) for way in processor_s}, arguments.repeats)
    report = Report(
        f"{arguments.runs} runs of {arguments.model}, {arguments.epochs} epochs of {arguments.images:,} photos, "
        f"{size_bytes / arguments.images / 1e3:.0f} kB each, batches of {arguments.batch} x {arguments.size} pixels, "
        f"{arguments.threads} decoding threads in each run"
    )
    for what, seconds in (("time", elapsed_s), ("processor time", processor_s)):
        for way, values in seconds.items():
            report.add_row(f"{way}: {what} of all runs", "s", values)
        report.add_ratio(f"{what}: {SEPARATE} / {SHARING}", seconds[SEPARATE], seconds[SHARING])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
