"""Steps per second with parameter servers, if one worker is four times as slow as the others."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch.distributed import HashStore

from datasvc.planning.layout import LOST_AFTER_S
from datasvc.trainer.servers.coordinator import Coordinator, Gate
from datasvc.trainer.servers.leases import parse_staleness
from datasvc.trainer.servers.worker_client import WorkerClient
from tools.bench.runner import Options, Report, bench, turns

WAYS = ("ssp:0", "ssp:3", "async")
FACTORS = (1, 1, 4)


@bench(
    repeats=3,
    steps=(40, "of each run"),
    part_ms=(50, "of a part of a step on a fast worker"),
    elements=(1_000_000, "of the weights"),
)
def slow_worker(options: Options) -> Report:
    """Steps per second with one server and three workers, of which one is four times as slow.

    All are threads of one process. A worker sleeps instead of computing, so that the workers share no processor.
    `ssp:0` waits for all workers in each step, as `bsp` does.
    """
    report = Report(
        f"1 server, 3 workers, {options.elements:,} weights, parts of {options.part_ms} and 4 times as many ms"
    )
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for _, way in turns(WAYS, options.repeats):
        rates[way].append(options.steps / train(way, options.steps, options.part_ms / 1e3, options.elements))
    for way in WAYS:
        report.add_row(way, "steps/s", rates[way])
    for way in WAYS[1:]:
        report.add_ratio(f"{way} / ssp:0", rates[way], rates["ssp:0"])
    return report


def train(way: str, num_steps: int, part_s: float, num_elements: int) -> float:
    """Return the seconds that some steps take."""
    store = HashStore()
    shard = {"weights": {"w": torch.zeros(num_elements)}, "moments": {}, "groups": [{"params": ["w"]}]}
    with ThreadPoolExecutor(len(FACTORS)) as threads:
        workers = [
            threads.submit(work, store, worker, factor * part_s, num_elements)
            for worker, factor in enumerate(FACTORS)
        ]
        coordinator = Coordinator(
            store,
            [shard],
            partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            num_workers=len(FACTORS),
            staleness=parse_staleness(way),
            welcome={},
            lost_after_s=LOST_AFTER_S,
        )
        for _ in coordinator.run_steps(Gate(0, 0, 2, 1, lambda _: 0.1)):
            pass  # connect
        began_s = time.perf_counter()
        for _ in coordinator.run_steps(Gate(0, 0, num_steps, 1, lambda _: 0.1)):
            pass
        seconds = time.perf_counter() - began_s
        coordinator.end()
        for worker in workers:
            worker.result()
    return seconds


def work(store: HashStore, worker: int, part_s: float, num_elements: int) -> None:
    """Pull, sleep and push until the end."""
    client = WorkerClient(store, worker=worker, num_servers=1, timeout_s=60, lost_after_s=LOST_AFTER_S)
    weights, gradients = torch.zeros(num_elements), torch.ones(num_elements)
    while (grant := client.next_grant()) is not None:
        client.pull([[weights]])
        time.sleep(part_s)
        client.push(grant, [[gradients]], loss=0.0, num_targets=1)
