"""The loader alone, photos of 110 kB: from shards in memory and from a node's cache, by every way to decode.

"Memory" is a local repository that is mapped in place, whose pages are there since they were just written. A ratio
is to the same loader with decode="cpu", which decodes on the processors and uploads bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from datasvc.cache import Cache
from gpu_stages.loading_rate import measure
from gpu_stages.photo_data import NUM_PHOTOS, make_photos
from gpu_stages.stage import Stage, last_json
from tools.bench.runner import Figure

ON_GPU = ("cpu", "gpu-window", "gpu-whole", "auto")
ONCE = "auto"  # it is one of the others, after a trial
PROGRAM = Path(__file__).with_name("loading_rate.py")
REPEATS = 2
LIMIT_S = 30.0  # of a process: all of them fit into the limit of the stage


def run(stage: Stage) -> None:
    """Measure every way to decode, in turn and each in a process of its own."""
    with stage.timed("photos"):
        _, split = make_photos(stage.kept, num_images=stage.choose(*NUM_PHOTOS))
        cache = Cache(stage.folder / "cache", budget=2 * split.table.size_bytes)
        cache.stage([split])
    if not stage.has_gpu:
        with stage.timed("loaders on the CPU"), cache:
            tiny = argparse.Namespace(batch=4, size=32, threads=1, seconds=0.01, decode="cpu", device="cpu")
            for place, held in (("memory", None), ("cache", cache)):
                stage.report.add_row(f"{place}, cpu", "images/s", [measure(split, held, tiny)["images_per_s"]])
        stage.need_gpu("decoding to a GPU was not measured")
    cache.close()
    with stage.timed("loaders"):
        rates = measure_all(stage)
    for name, values in rates.items():
        place, _, decode = name.partition(", ")
        if decode != "cpu" and len(values) == len(rates.get(f"{place}, cpu", ())):
            stage.report.add_ratio(f"{name} / cpu", values, rates[f"{place}, cpu"])


def measure_all(stage: Stage) -> dict[str, list[float]]:
    """Return images per second by place and decoder; one whose process ended is not run again, and named as such."""
    places = {"memory": (), "cache": ("--cache", stage.folder / "cache")}
    commands = {
        f"{place}, {decode}": (*options, "--decode", decode) for place, options in places.items() for decode in ON_GPU
    }
    rates: dict[str, list[float]] = {name: [] for name in commands}
    problems: dict[str, str] = {}
    repository = stage.kept / "repository"
    for repeat in range(REPEATS):
        for name in list(commands) if repeat % 2 == 0 else reversed(commands):
            if name in problems or (repeat and name.endswith(ONCE)):
                continue
            try:
                printed = stage.once(
                    f"{name}, {repeat}",
                    partial(stage.run, "-P", PROGRAM, repository, *commands[name], limit_s=LIMIT_S),
                )
            except subprocess.CalledProcessError as error:
                problems[name] = f"ended with status {error.returncode}"
                print(f"{name}: {problems[name]}", flush=True)
            except subprocess.TimeoutExpired:
                problems[name] = f"killed after {LIMIT_S:g} s"
                print(f"{name}: {problems[name]}", flush=True)
            else:
                rates[name].append(last_json(printed)["images_per_s"])
                print(f"{name}: {json.dumps(last_json(printed))}", flush=True)
        stage.report.rows = to_rows(rates, problems)
        stage.write()  # a stage that is ended keeps what it has
    return rates


def to_rows(rates: Mapping[str, Sequence[float]], problems: Mapping[str, str]) -> list[Figure]:
    """Return what was found so far as rows, one for each problem too."""
    rows = []
    for name, values in rates.items():
        if values:
            rows.append(Figure(name, "images/s", list(values)))
        if name in problems:
            rows.append(Figure(f"{name}: {problems[name]}, after so many runs", "runs", [len(values)]))
    return rows
