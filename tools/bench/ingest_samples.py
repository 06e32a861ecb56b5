"""Samples/s and memory of `datasvc.shards.ingest` on many small samples: a million of 1 kB in Parquet files.

Beside it pyarrow's own reading of the same files, column by column, which makes no samples of them. Each ingest is a
fresh process, so that its time holds the start of its workers, and the peak resident set of each worker can be read.

    python tools/bench/ingest_samples.py [--repeats 5] [--samples 1000000] [--folder WHERE] [--json]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from report import ROOT, Report, alternate, make_parser

SAMPLE_BYTES = 1000
FILES = 10

INGEST = r"""
import datasvc.cli  # settles Arrow's memory, as for the command
import json, re, sys, time
from datasvc.repository import Repository
from datasvc.shards import ingest
from datasvc.shards.ingestion import executors
peaks = sys.argv[3]
build = executors.build_unit
def build_unit(*arguments):
    result = build(*arguments)
    with open("/proc/self/status") as status, open(peaks, "a") as file:
        file.write(re.search(r"VmHWM:\s+(\d+)", status.read())[1] + "\n")
    return result
executors.build_unit = build_unit
started = time.perf_counter()
report = ingest(Repository.create(sys.argv[1]), sys.argv[2], "samples", workers=int(sys.argv[4]))
print(json.dumps({"seconds": time.perf_counter() - started, "samples": report.num_samples["train"]}))
"""


def write_samples(folder: Path, num_samples: int) -> None:
    """Write `FILES` Parquet files of samples with a blob, a label and a text."""
    generator = np.random.default_rng(0)
    count = num_samples // FILES
    for number in range(FILES):
        content = pa.py_buffer(generator.bytes(count * SAMPLE_BYTES))
        offsets = pa.py_buffer(np.arange(count + 1, dtype=np.int64) * SAMPLE_BYTES)
        blobs = pa.Array.from_buffers(pa.large_binary(), count, [None, offsets, content])
        table = pa.table(
            {
                "blob": blobs,
                "label": generator.integers(0, 100, count),
                "text": [f"sample {number * count + each}" for each in range(count)],
            }
        )
        pq.write_table(table, folder / f"{number:03d}.parquet", row_group_size=20_000)


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="default the folder for temporary files")
    arguments = parser.parse_args()
    peaks: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="datasvc-bench-") as name:
        source = Path(name) / "source"
        source.mkdir()
        write_samples(source, arguments.samples)

        def run_ingest(workers: int) -> float:
            target, told = Path(name) / "repo", Path(name) / "peaks"
            os.sync()
            words = [sys.executable, "-c", INGEST, str(target), str(source), str(told), str(workers)]
            done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
            said = json.loads(done.stdout)
            assert said["samples"] == arguments.samples
            peaks[workers].append(max(int(line) for line in told.read_text().split()) / 1024)
            shutil.rmtree(target)
            told.unlink()
            return float(said["seconds"])

        def run_read() -> float:
            started = time.perf_counter()
            for path in sorted(source.iterdir()):
                for _ in pq.ParquetFile(path).iter_batches(4096, use_threads=False):
                    pass
            return time.perf_counter() - started

        contestants = {
            "1 process": lambda: run_ingest(1),
            "2 workers": lambda: run_ingest(2),
            "pyarrow reads": run_read,
        }
        seconds = alternate(contestants, arguments.repeats)
    report = Report(
        f"Ingest of {arguments.samples:,} samples of {SAMPLE_BYTES} bytes from {FILES} Parquet files",
        "The start of the workers is counted.",
    )
    for contestant, values in seconds.items():
        report.add_row(contestant, "samples/s", [arguments.samples / value for value in values])
    report.add_row("peak resident set of one of 2 workers", "MiB", peaks[2])
    report.add_row("peak resident set of 1 process", "MiB", peaks[1])
    report.add_ratio("2 workers / 1 process", seconds["1 process"], seconds["2 workers"])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
