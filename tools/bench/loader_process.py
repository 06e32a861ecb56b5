"""What a training process with one loader costs: first batch when cold, resume, memory. Each in a fresh process.

    python tools/bench/loader_process.py REPOSITORY CACHE [--batch 64] [--threads 2] [--size 224]

prints JSON: milliseconds from a state to its first batch, from the loader's start to its first batch, and steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from report import ROOT

SIZE_ARGUMENTS = ("batch", "size", "threads")
STEPS_FOR_MEMORY = 40
MEMORY = {"peak_mb": "Pss:", "peak_anonymous_mb": "Pss_Anon:", "peak_files_mb": "Pss_File:"}
"""Peaks, each by itself: of all, of the process's own memory, and of files that it maps: libraries and shards."""
SAMPLE_PAUSE_S = 0.02
RESUMED_SHARE = 5 / 6  # sample 5,000 of 6,000


def measure_process(repository: Path, cache: Path, settings: argparse.Namespace) -> dict[str, float]:
    """Return what one fresh process costs: seconds to its first batch, milliseconds to resume and start, peak MB."""
    sizes = [f"--{size}={getattr(settings, size)}" for size in SIZE_ARGUMENTS]
    words = [sys.executable, __file__, str(repository), str(cache), *sizes]
    started = time.perf_counter()
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first_batch_s = time.perf_counter() - started
        peak = dict.fromkeys(MEMORY, 0.0)
        while process.poll() is None:
            now = _proportional_mb(process.pid)
            peak = {name: max(peak[name], now.get(field, 0.0)) for name, field in MEMORY.items()}
            time.sleep(SAMPLE_PAUSE_S)
        found = json.loads(process.stdout.readline())
    return found | peak | {"first_batch_s": first_batch_s}


def _proportional_mb(pid: int) -> dict[str, float]:
    """Return the proportional set of a process that starts no others, in all and by kind; {} when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    fields = [line.split() for line in lines if line.startswith("Pss")]
    return {name: int(kilobytes) * 1024 / 1e6 for name, kilobytes, _ in fields}


def main() -> None:
    """Be the training process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository")
    parser.add_argument("cache")
    for name, default in zip(SIZE_ARGUMENTS, (64, 224, 2), strict=True):
        parser.add_argument(f"--{name}", type=int, default=default)
    settings = parser.parse_args()

    import datasvc
    from datasvc.cache import Cache
    from datasvc.loaders import DecodeConfig, ImageLoader

    split = next(iter(datasvc.open(settings.repository).dataset("photos@1").values()))

    def make(cache: Cache) -> ImageLoader:
        decode = DecodeConfig(num_threads=settings.threads)
        return ImageLoader(
            split, batch_size=settings.batch, training=True, cache=cache, size=settings.size, decode=decode
        )

    with Cache(settings.cache) as cache:
        with make(cache) as loader:
            next(iter(loader))
            print("first batch", flush=True)
            for number, _ in enumerate(loader):
                if number == STEPS_FOR_MEMORY:
                    break
            state = loader.state_dict()
        state |= {"position": int(len(split) * RESUMED_SHARE)}
        times = {}
        for name in ("start_ms", "resume_ms"):
            with make(cache) as loader:
                started = time.perf_counter()
                if name == "resume_ms":
                    loader.load_state_dict(state)
                next(iter(loader))
                times[name] = (time.perf_counter() - started) * 1e3
    print(json.dumps(times))


if __name__ == "__main__":
    main()
