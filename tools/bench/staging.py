"""The forecast of `datasvc plan staging` beside nodes that stage: `datasvc serve` in network namespaces."""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from datasvc.cache.peers.peer_source import TOKEN_VARIABLE
from datasvc.planning.staging import StagingOptions, plan_staging
from datasvc.repository import Objects
from datasvc.sizes import parse_size
from tools.bench.cache_nodes import serve_node
from tools.bench.cache_store import Store
from tools.bench.namespaces import bridged_nodes, inside
from tools.bench.origin import Limits, OriginProcess
from tools.bench.photos import write_photos
from tools.bench.runner import ROOT, Options, Report, bench, call_command, environment, turns

LATENCY_S = 0.02
# Of a full packet with time stamps: the bytes that a link of limited rate carries beside the content.
_PAYLOAD = 1448 / 1514
_PORT = 8765
_SEEDS = range(5)  # each seed gives other owners


@bench(
    repeats=3,
    nodes={"type": int, "nargs": "+", "default": [4, 8, 16], "help": "the first number calibrates"},
    images=(400, "of the data"),
    shard_size={"type": parse_size, "default": 256 << 10, "help": "of each object"},
    link={"type": parse_size, "default": 4_000_000, "help": "bytes/s of each node in each direction"},
    total_rate={"type": parse_size, "default": 15_000_000, "help": "bytes/s of the origin"},
)
def staging(options: Options) -> Report:
    """Time in which nodes stage the same data at once, beside the forecast of `datasvc plan staging`.

    The nodes are network namespaces with links of limited rate (tbf), joined by a bridge, and the origin is another
    one. The first number of nodes gives the time of an object in which no bytes flow (`object_s`), by its median
    time; the forecasts of all numbers of nodes use it. A forecast is the median over five sets of owners. The links
    are slow, so that the processor is not the bound, and the objects small: a node takes a peer for failed that sends
    less than 1 MiB/s for 5 s.
    """
    photos = options.folder / "photos"
    write_photos(photos, num_images=options.images)
    store = Store.of_photos(photos, options.folder, shard_bytes=options.shard_size)
    infos = store.split.table.shards()
    sizes = [info.size_bytes for info in infos]
    seconds: dict[int, list[float]] = {number: [] for number in options.nodes}
    reads: dict[int, list[float]] = {number: [] for number in options.nodes}
    for _, number in turns(options.nodes, options.repeats):
        found = stage_nodes(store, number, sum(sizes), options)
        seconds[number].append(found["seconds"])
        reads[number].append(
            sum(found["paths"].get(f"/{Objects.path(info.digest)}", 0) for info in infos) / sum(sizes)
        )

    @cache
    def predict(number: int, object_s: float) -> float:
        planned = [
            plan_staging(
                number,
                StagingOptions(
                    size_bytes=sum(sizes),
                    object_bytes=sum(sizes) // len(sizes) + 1,
                    origin_bytes_s=options.total_rate,
                    origin_latency_s=LATENCY_S,
                    node_bytes_s=options.link * _PAYLOAD,
                    object_s=object_s,
                    seed=seed,
                ),
            ).staged_s
            for seed in _SEEDS
        ]
        return statistics.median(planned)

    first = options.nodes[0]
    object_s = min(
        (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2),
        key=lambda each: abs(predict(first, each) - statistics.median(seconds[first])),
    )
    report = Report(
        f"Nodes that stage {sum(sizes) / 1e6:.0f} MB in {len(sizes)} objects, links of {options.link / 1e6:g} MB/s, "
        f"an origin of {options.total_rate / 1e6:g} MB/s",
        f"Calibrated by {first} nodes: {object_s * 1e3:g} ms for each object.",
    )
    for number, values in seconds.items():
        report.add_row(f"{number} nodes: measured", "s", values)
        report.add_row(f"{number} nodes: forecast", "s", [predict(number, object_s)])
        report.add_ratio(f"{number} nodes: forecast / measured", [predict(number, object_s)] * len(values), values)
        report.add_row(f"{number} nodes: bytes from the origin / data", "", reads[number])
    return report


def stage_nodes(store: Store, number: int, data_bytes: int, options: Options) -> dict[str, Any]:
    """Stage on `number` fresh nodes at once; returns the seconds of the slowest, and the origin's bytes by path."""
    limits = Limits(None, options.total_rate, LATENCY_S)
    with (
        store.fresh_folder() as folder,
        bridged_nodes([None] + [options.link] * number) as spaces,
        ExitStack() as stack,
    ):
        (outside, origin_address), *nodes = spaces
        origin = stack.enter_context(
            OriginProcess(store.repository.url, limits, host=origin_address, prefix=inside(outside))
        )
        peers = ",".join(f"http://{address}:{_PORT}" for _, address in nodes)
        variables = environment(**{TOKEN_VARIABLE: secrets.token_hex(16)})
        programs = []
        for node, address in nodes:
            arguments = (folder / address, origin.url, 2 * data_bytes, peers, address)
            command = [*inside(node), *call_command(run_node, *arguments)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            programs.append(subprocess.Popen(command, cwd=ROOT, env=variables, text=True, **pipes))
            stack.callback(programs[-1].communicate)
        _read_all(programs)  # all nodes serve
        origin.forget()
        for program in programs:
            assert program.stdin is not None
            program.stdin.write("stage\n")
            program.stdin.flush()
        seconds = max(each["seconds"] for each in _read_all(programs))
        return {"seconds": seconds, "paths": origin.counts()["paths"]}


def _read_all(programs: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    return [json.loads(program.stdout.readline()) for program in programs if program.stdout is not None]


def run_node(folder: str, repository: str, budget: int, peers: str, address: str) -> None:
    """Be a node: serve, stage after a line of input, print the seconds of the job, and serve until the input ends."""
    with serve_node(Path(folder), repository, budget, _PORT, peers, address) as node:
        print("{}", flush=True)
        if not sys.stdin.readline():
            return
        node.start_staging()
        node.wait()
        print(json.dumps({"seconds": node.seconds}), flush=True)
        sys.stdin.read()
