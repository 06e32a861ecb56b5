"""Pages of `datasvc ui`: of large data, of many versions, and of a run that is going on."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import datasvc
from datasvc.models.search.index import INDEX_PATH
from datasvc.repository import Repository
from datasvc.runs import RunLog
from datasvc.testing import small_dataset
from tools.bench.large_versions import commit_table
from tools.bench.models_find import write_versions
from tools.bench.photos import write_photos
from tools.bench.runner import ROOT, Options, Report, bench, column, run_rounds, timed
from tools.bench.ui_server import UiServer, running_server

REQUESTS_AT_ONCE = 6
PAGES = {
    "data set": "/datasets/huge@1",
    "samples": "/datasets/huge@1/samples/train",
    "samples in the middle": "/datasets/huge@1/samples/train?start=50000",
    "samples where": "/datasets/huge@1/samples/train?where=label+%3D+3",
    "samples sorted": "/datasets/huge@1/samples/train?order=key",
    "look-up of a key that is missing": "/datasets/huge@1/samples/train?key=none",
    "one sample": "/datasets/huge@1/samples/train/777",
    "change of a model's layers": "/compare/net@1/net@2?norms=1",
}


FIRST_PAGES = {
    "home": "/",
    "list of models": "/models",
    "model, newest versions": "/models/resnet",
    "model, versions in the middle": "/models/resnet@{middle}",
}
ALL_VERSIONS = {
    "metric over all versions, and make the index in memory": "/models/resnet?span=all",
    "metric over all versions": "/models/resnet?span=all&axis=version",
}
MEMORY = "peak memory of the server, "
_MOTO = ROOT / "tests" / "support" / "moto_process.py"
_CURVES = ("loss", "rate", "images_per_s", "grad_norm", "scale", "momentum", "entropy", "accuracy", "gap")
_MAX_WAIT_S = 60.0


@bench(repeats=5, shards=4000, samples=(25_000, "of each shard"), model_mb=(100, "of each version of the model"))
def pages(options: Options) -> Report:
    """Pages of data in the browser: a version of 100 million samples, 100 thumbnails, the change of a model's layers.

    The large version is one shard of 25,000 small images, listed 4,000 times by its shard table, so the pages read a
    file that is in memory. The thumbnails are of 100 photos (500x375) on the local disk; "again" has them from the
    cache. Each round starts a new server with an empty cache; six requests run at a time, as in a browser. The model
    has two versions of one tensor, whose change another process measures. Memory is the peak resident set of the
    server.
    """
    url = write_large(options.folder, options.shards, options.samples, options.model_mb)
    found = run_rounds({"pages": partial(time_pages, url)}, options.repeats)["pages"]
    report = Report(
        f"Pages of {options.shards * options.samples:,} samples in {options.shards:,} shards; thumbnails",
        "The first page of a process imports DuckDB too.",
    )
    for name in found[0]:
        report.add_row(name, "MB" if name == "memory" else "s", column(found, name))
    return report


def write_large(folder: Path, num_shards: int, num_samples: int, model_mb: int) -> str:
    """Make a repository with `huge@1`, `photos@1`, `net@1` and `net@2`; return its URL."""
    repo = datasvc.open(str(folder / "repo"), create=True)
    one = small_dataset(repo, "one", samples=num_samples, image_size=32, shard_bytes=1 << 40)["train"].table
    counts = {label: count * num_shards for label, count in one.label_counts.items()}
    table = replace(one, rows=one.rows.take([0] * num_shards), label_counts=counts)
    commit_table(repo.repository, "huge", table)
    write_photos(folder / "photos" / "train", num_images=100)
    repo.datasets.ingest(str(folder / "photos"), "photos")
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        repo.models.save("net", {"weight": torch.rand(model_mb * 250_000, generator=generator)}, step=step)
    return str(folder / "repo")


def time_pages(url: str) -> dict[str, float]:
    """Return seconds of each page, from a new server, and the server's memory."""
    times: dict[str, float] = {}

    def load(name: str, paths: list[str]) -> None:
        times[name] = timed(lambda: list(pool.map(server.fetch, paths)))

    with (
        tempfile.TemporaryDirectory(prefix="datasvc-bench-") as home,
        ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool,
        running_server(url, Path(home)) as server,
    ):
        for name, path in PAGES.items():
            load(f"{name}, first", [path])
            load(f"{name}, again", [path])
        page = server.fetch("/datasets/photos@1/samples/train").decode()
        images = re.findall(r'<img src="([^"]*)"', page)
        assert len(images) == 100, len(images)
        load("100 thumbnails, first", images)
        load("100 thumbnails, again", images)
        times["memory"] = server.peak_mb()
    return times


@bench(repeats=5, versions=10_000)
def ui_pages(options: Options) -> Report:
    """How long the first pages of `datasvc ui` take over very many versions, and the memory of its server.

    Every round starts a new server, so that each page is the first of its kind. The versions are those of
    `models_find`: some 30 settings and 6 metrics each. The time is that of the complete response to one request on
    the loopback.
    """
    url = str(options.folder / "repository")
    write_versions(Repository.create(url), range(1, options.versions + 1))

    def load_all() -> dict[str, float]:
        found = {}
        Path(url, INDEX_PATH).unlink(missing_ok=True)
        with running_server(url, options.folder) as server:
            for what, paths in (("first pages", FIRST_PAGES), ("all versions", ALL_VERSIONS)):
                for name, path in paths.items():
                    address = path.format(middle=options.versions // 2)
                    found[name] = 1e3 * timed(lambda address=address: server.fetch(address))
                found[MEMORY + what] = server.peak_mb()
        return found

    found = run_rounds({"pages": load_all}, options.repeats)["pages"]
    report = Report(
        f"Pages of {options.versions:,} versions of a model, each the first of a new server",
        "The entries name tensors that do not exist, so the pages have no stored size.",
    )
    for name in sorted(found[0], key=lambda name: name.startswith(MEMORY)):
        report.add_row(name, "MB" if name.startswith(MEMORY) else "ms", column(found, name))
    return report


@bench(
    repeats=1,
    points=(20, "points whose time is measured"),
    steps=(4000, "of the run before"),
    only={"choices": ["local", "s3"]},
)
def ui_live(options: Options) -> Report:
    """How long a new point of a run takes until a reader of its page has it, and what a refresh sends.

    A program reports steps with nine curves to a log with the usual settings. A reader follows the page of the run as
    the browser's script does: it waits for an event, then asks for the parts that have changed. The time is from the
    report of a step to the end of the response that has it; steps are reported at random times. The repository is a
    local folder, and a bucket of moto's S3 server on this machine. Drawing in the browser comes on top.
    """
    report = Report(f"A new point of a live run with {options.steps:,} steps and {len(_CURVES)} curves")
    for store in ("local", "s3") if options.only is None else (options.only,):
        with moto_bucket() if store == "s3" else nullcontext(f"{options.folder}/repository") as url:
            times_s, sizes = follow_run(url, options.folder, options.steps, options.points)
        report.add_row(f"{store}: report until the page has the point", "s", times_s)
        report.add_row(f"{store}: a refresh", "kB", [size / 1e3 for size, _ in sizes])
        report.add_row(f"{store}: a refresh, compressed", "kB", [size / 1e3 for _, size in sizes])
    return report


class Reader:
    """Follows the page of a run, and notes when it has which step."""

    def __init__(self, server: UiServer, run: str) -> None:
        self._server = server
        self._run = run
        self._digests: dict[str, str] = {}
        self._seen = threading.Condition()
        self._step = -1
        self.refresh_bytes: list[tuple[float, float]] = []
        threading.Thread(target=self._follow, daemon=True).start()

    def wait_for(self, step: int) -> float:
        """Return when the page has had a step, by `time.perf_counter`."""
        with self._seen:
            if not self._seen.wait_for(lambda: self._step >= step, _MAX_WAIT_S):
                raise SystemExit(f"step {step} has not come within {_MAX_WAIT_S:g} s; the page has step {self._step}")
            return self._seen_s

    def _follow(self) -> None:
        with urllib.request.urlopen(f"{self._server.address}/api/runs/{self._run}/events") as events:  # noqa: S310
            for line in events:
                if line.startswith(b"data:"):
                    self._refresh()

    def _refresh(self) -> None:
        present = " ".join(f"{name}={digest}" for name, digest in self._digests.items())
        request = urllib.request.Request(  # noqa: S310
            f"{self._server.address}/api/parts/runs/{self._run}",
            headers={"Datasvc-Parts": present, "Accept-Encoding": "gzip"},
        )
        with urllib.request.urlopen(request) as response:  # noqa: S310
            body = response.read()
        content = gzip.decompress(body)
        answer = json.loads(content)
        # The tables of numbers are in elements that are closed at first: the script does not ask for them.
        names = [name for name in answer["ids"] if not name.endswith("-numbers")]
        self._digests = {name: self._digests.get(name, "") for name in names}
        self._digests |= {name: part["digest"] for name, part in answer["parts"].items()}
        chart = answer["parts"].get("chart-0")
        if chart is None:
            if names and not present:
                self._refresh()  # the first answer has the names of the parts
            return
        with self._seen:
            self.refresh_bytes.append((float(len(content)), float(len(body))))
            self._step, self._seen_s = json.loads(chart["series"])["x"][-1], time.perf_counter()
            self._seen.notify_all()


@contextmanager
def moto_bucket() -> Iterator[str]:
    """Serve an empty bucket; yield its URL. The environment of this process gets what clients need."""
    import boto3

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, _MOTO, "127.0.0.1"], **pipes, text=True) as moto:
        assert moto.stdout is not None
        address = f"http://127.0.0.1:{int(moto.stdout.readline())}"
        os.environ |= {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "TESTKEY",
            "AWS_SECRET_ACCESS_KEY": "SECRET",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        boto3.client("s3").create_bucket(Bucket="bench")
        try:
            yield "s3://bench/repository"
        finally:
            moto.communicate()


def follow_run(
    url: str, home: Path, num_steps: int, num_points: int
) -> tuple[list[float], list[tuple[float, float]]]:
    """Return the seconds of each point, and the bytes of each refresh but the first, before and after compression."""
    chance = random.Random(0)  # noqa: S311 - no secret
    repository = Repository.create(url)
    times_s = []

    def report(step: int) -> None:
        times = {"step_s": 0.1, "wait_s": 0.01, "forward_s": 0.03, "backward_s": 0.04, "update_s": 0.01}
        log.report("step", step=step, **{name: chance.random() for name in _CURVES}, **times)

    with RunLog.open(repository, "live") as log, running_server(url, home) as server:
        for step in range(num_steps):
            report(step)
        if not log.flush():
            raise SystemExit(f"the log cannot be written to {url}")
        reader = Reader(server, log.ref)
        reader.wait_for(num_steps - 1)
        for step in range(num_steps, num_steps + num_points):
            time.sleep(chance.uniform(0.5, 2.5))  # at any moment between two parts of the log
            began_s = time.perf_counter()
            report(step)
            times_s.append(reader.wait_for(step) - began_s)
    return times_s, reader.refresh_bytes[1:]
