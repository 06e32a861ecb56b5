"""Images per second with a decode server on a processor of its own."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from datasvc.cache import Cache
from datasvc.loaders import DecodeConfig, ImageLoader, PixelFormat
from datasvc.loaders.decode.servers import DecodeServers
from datasvc.loaders.decode.serving import Decoder, EncodedImage
from datasvc.loaders.decode.worker import ImageWorker
from datasvc.shards import Split
from tools.bench.namespaces import inside
from tools.bench.photos import staged_photos
from tools.bench.runner import Options, Report, bench, column, environment, rate_of, run_rounds
from tools.bench.slow_link import ADDRESSES, shaped_nodes

ALONE, SERVED, BOTH = "one processor", "one processor, and a decode server on another", "two processors"
COSTS: Final = {"here": "decode here", "sent": "send to a server, and receive", "served": "decode in the server"}
REQUESTS = 50


@bench(repeats=5, images=2000, batch=64, size=224, gbit=(0.0, "of a link to the server, on a node of its own (root)"))
def decode_servers(options: Options) -> Report:
    """Images/s of `ImageLoader` on one processor, with and without a decode server on another, and on two.

    The loader has a decoding thread for each of its processors, and the server has one thread. Both are on one
    machine, over the loopback, so a ratio shows what sending costs the two processors, and not what a network adds;
    with `--gbit`, in two network namespaces that a link of this speed joins.
    Then the processor time of an image: decoded by a thread here; or sent to the server in requests of 8, in both
    processes.
    """
    first, second, *_ = sorted(os.sched_getaffinity(0)) * 2
    if first == second:
        sys.exit("two processors are needed")
    with (
        staged_photos(options.folder, num_images=options.images) as (split, cache, size_bytes),
        _network(options.gbit) as (prefix, address),
        _running_server(options, second, prefix, address) as (url, process),
    ):
        arms = {
            ALONE: lambda: _rate(split, cache, options, {first}),
            SERVED: lambda: _rate(split, cache, options, {first}, url),
            BOTH: lambda: _rate(split, cache, options, {first, second}),
        }
        rates = run_rounds(arms, options.repeats, warm_up=True)
        costs = run_rounds({"": partial(_costs, url, process, options)}, options.repeats, warm_up=True)[""]
    report = Report(
        f"Training batches of {options.batch} x {options.size} pixels from {options.images:,} photos, "
        f"{size_bytes / options.images / 1e3:.0f} kB each"
    )
    report.add_rows("images/s", rates)
    for key, name in COSTS.items():
        report.add_row(f"processor time to {name}", "ms/image", column(costs, key))
    report.add_ratio(f"{SERVED} / {ALONE}", rates[SERVED], rates[ALONE])
    report.add_ratio(f"{SERVED} / {BOTH}", rates[SERVED], rates[BOTH])
    report.add_ratio(f"{COSTS['sent']} / {COSTS['here']}", column(costs, "sent"), column(costs, "here"))
    report.add_ratio(f"{COSTS['served']} / {COSTS['here']}", column(costs, "served"), column(costs, "here"))
    return report


def _costs(url: str, process: int, options: Options) -> dict[str, float]:
    """Return milliseconds of processor time per image, by the keys of `COSTS`."""
    paths = sorted((options.folder / "photos").glob("*/*.jpg"))[:8]
    images = [EncodedImage(np.fromfile(path, np.uint8), [20, 30], [300, 400]) for path in paths]
    worker = ImageWorker(PixelFormat("uint8"), options.size, backend="cpu", framework="torch")
    servers = DecodeServers([url], Decoder(options.size, "cpu", "torch"))
    connection = servers.connections()[0]
    began, began_there = time.process_time(), _processor_s(process)
    for _ in range(REQUESTS):
        if connection.decode(images) is None:
            sys.exit("the server did not decode")
    between, ended_there = time.process_time(), _processor_s(process)
    for _ in range(REQUESTS):
        for image in images:
            worker.scale(image.blob, image.start, image.shape)
    seconds = {
        "here": time.process_time() - between,
        "sent": between - began,
        "served": ended_there - began_there,
    }
    servers.close()
    return {key: 1e3 * value / (REQUESTS * len(images)) for key, value in seconds.items()}


def _processor_s(process: int) -> float:
    """Return the seconds of processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rate(split: Split, cache: Cache, options: Options, processors: set[int], *servers: str) -> float:
    """Return images/s of an epoch, with one decoding thread on each of some processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)  # of this thread, and of those that it starts
    try:
        decode = DecodeConfig("cpu", num_threads=len(processors), servers=servers)
        loader = ImageLoader(
            split, batch_size=options.batch, training=True, cache=cache, size=options.size, decode=decode
        )
        with loader:
            return rate_of(loader, options.batch)
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _network(gbit: float) -> Iterator[tuple[list[str], str]]:
    """Yield the start of a command of the server's node and its address; this process enters the other node."""
    if not gbit:
        yield [], "127.0.0.1"
        return
    with shaped_nodes(gbit * 1e9 / 8) as (here, there), Path(f"/proc/{here}/ns/net").open() as network:
        # For this thread and all that it starts, until the end of the program.
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), 0):
            raise OSError(ctypes.get_errno(), "cannot enter a network namespace; run as root")
        yield inside(there), ADDRESSES[1]


@contextmanager
def _running_server(options: Options, processor: int, prefix: list[str], address: str) -> Iterator[tuple[str, int]]:
    """Yield the URL and the process of a node that decodes in one thread, on one processor."""
    os.environ["DATASVC_TOKEN"] = secrets.token_hex(16)  # a node that others reach needs one
    command = [*prefix, sys.executable, "-m", "datasvc", "serve", "--decode-threads", "1", "--host", address]
    command += ["--port", "0", "--json", "--log-level", "warning", "--budget", "10MB"]
    command += ["--cache", str(options.folder / "served"), "--repo", f"{options.folder}/repository"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(OMP_NUM_THREADS="1")) as server:
        assert server.stdout is not None
        os.sched_setaffinity(server.pid, {processor})
        line = server.stdout.readline()
        if not line:
            sys.exit("the server has not started; its error is above")
        try:
            yield json.loads(line)["url"], server.pid
        finally:
            server.terminate()
