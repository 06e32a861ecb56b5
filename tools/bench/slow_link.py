"""All-reduces over a slow link: two nodes of this machine, as network namespaces joined by a link of limited speed.

Needs root, iproute2 (`ip`, `tc`) and util-linux (`unshare`, `nsenter`). Ranks of one node reach each other over its
own loopback, which is not limited.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import datasvc.trainer as hvd
from datasvc.planning.cluster import Cluster, Link, all_ranks, all_reduce_s
from datasvc.trainer.recipes.models import build_model
from tools.bench.delayed_link import relay
from tools.bench.namespaces import inside, limit_rate, run_on, start_node
from tools.bench.ranks import say, time_block
from tools.bench.runner import ROOT, Options, Report, bench, call_command, environment, turns

NUM_NODES, RANKS_PER_NODE = 2, 2
AUTO, MAX_STEPS_TO_CHOOSE = "auto", 20
GRID_MIB = (0.5, 1, 2, 4, 8, 16, 25, 64)
FLAT, HIERARCHICAL, INSIDE = "flat", "hierarchical", "inside"
NUM_REDUCTIONS = 4
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PORT = 29471  # no other program can have it: the namespaces are new


@bench(
    repeats=7,
    mbit=(1000, "of the link"),
    backward_ms=(300.0, "of a step"),
    steps=(4, "of a block"),
    grid={"type": float, "nargs": "+", "default": GRID_MIB, "help": "in MiB; default: %(default)s"},
)
def buckets(options: Options) -> Report:
    """Buckets whose size `bucket_bytes="auto"` chooses, beside a grid of sizes: two nodes of one rank, a slow link.

    The nodes are network namespaces, joined by a link of limited bandwidth (tbf). A step has gradients of ResNet-18's
    sizes (46 MB), and a backward pass that sleeps for each convolution: the processor is free, as if a GPU computed.
    In every round, in alternating order: a block of steps with each size of the grid, and one with the size that
    "auto" has chosen, by the time of the slower rank. Ratios are within each round: "grid / auto" above 1 means that
    the chosen size is faster. The best of the grid is the one with the lowest median.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    note = ""
    with shaped_nodes(options.mbit * 1e6 / 8) as nodes:
        sizes = (options.repeats, options.backward_ms / 1e3, options.steps, list(options.grid))
        for block in run_on_nodes(nodes, 1, time_buckets, *sizes):
            if "note" in block:
                note = block["note"]
            else:
                seconds[block["size"]].append(block["s"])
    report = Report(f"{NUM_NODES} nodes of 1 rank, {options.mbit} Mbit/s, one thread a rank", note)
    report.add_rows("ms/step", seconds, lambda value: 1e3 * value)
    grid = {size: values for size, values in seconds.items() if size != AUTO}
    for size, values in grid.items():
        report.add_ratio(f"{size} / {AUTO}", values, seconds[AUTO])
    best = min(grid, key=lambda size: statistics.median(grid[size]))
    report.add_ratio(f"{AUTO} / best of the grid, {best}", seconds[AUTO], grid[best])
    return report


def time_buckets(repeats: int, backward_s: float, num_steps: int, grid_mib: Sequence[float]) -> None:
    """Be a rank of `buckets`; rank 0 prints the time of each block."""
    dist.init_process_group("gloo")  # the engine uses it too, and leaves it standing
    hvd.init()
    sizes = {f"{mib:g} MiB": int(mib * 2**20) for mib in grid_mib}
    trainings = {name: Training(backward_s, size) for name, size in {AUTO: AUTO, **sizes}.items()}
    chosen = trainings[AUTO].optimizer
    for _ in range(MAX_STEPS_TO_CHOOSE):
        if chosen.is_choosing_buckets:
            trainings[AUTO].step()
    cost = chosen.all_reduce_cost
    say(
        note=f"auto: {chosen.bucket_bytes / 2**20:.2f} MiB; an all-reduce takes {cost.alpha_s * 1e3:.2f} ms + "
        f"{cost.beta_s * 1e9:.2f} ms per MB"
    )
    for _, name in turns(trainings, repeats):
        trainings[name].step()  # warm-up
        say(size=name, s=time_block(trainings[name].step, num_steps)[0])
    hvd.shutdown()
    dist.destroy_process_group()


class Training:
    """Parameters of a model's shapes, and a step with one size of buckets, whose backward pass takes a given time."""

    def __init__(self, backward_s: float, bucket_bytes: Any) -> None:
        shapes = [parameter.shape for parameter in build_model("resnet18", 1000).parameters()]
        self._weights = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        # A convolution takes about as long as another; its normalization next to nothing.
        num_large = sum(len(shape) > 1 for shape in shapes)
        self._seconds = [backward_s / num_large if len(shape) > 1 else 0.0 for shape in shapes]
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self._weights, 1e-3), bucket_bytes=bucket_bytes)

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        x = torch.zeros(1, requires_grad=True)
        for weight, backward_s in zip(self._weights, self._seconds, strict=True):
            x = _Layer.apply(x, weight, backward_s)
        x.sum().backward()
        self.optimizer.step()


class _Layer(torch.autograd.Function):
    """The identity of `x`, with a gradient of the weight after some time in which the processor is free."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, backward_s: float) -> Tensor:
        ctx.shape, ctx.backward_s = weight.shape, backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]  # as torch's own
        time.sleep(ctx.backward_s)
        return gradient, torch.zeros(ctx.shape), None


@bench(
    repeats=7,
    mbit={"type": int, "nargs": "+", "default": [200, 1000], "help": "of the link; default: %(default)s"},
    sizes={"type": int, "nargs": "+", "default": [1, 4, 16], "help": "in MB; default: %(default)s"},
)
def hierarchical(options: Options) -> Report:
    """Hierarchical beside flat all-reduces, and what the profile's model predicts for them: two nodes of two ranks.

    The nodes are network namespaces, joined by a link of limited bandwidth (tbf); the ranks of a node use its
    loopback. In every round, in alternating order: blocks of flat and of hierarchical all-reduces of each size,
    through the engine, by the time of the slowest rank. The predictions get the bandwidth of the link, and from the
    same round the bandwidth between the ranks of a node and the cost of a message: all-reduces inside both nodes at
    once.
    """
    report = Report(f"{NUM_NODES} nodes of {RANKS_PER_NODE} ranks, gloo, one thread a rank")
    for mbit in options.mbit:
        # By way and size, the seconds of each round.
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        with shaped_nodes(mbit * 1e6 / 8) as nodes:
            for block in run_on_nodes(nodes, RANKS_PER_NODE, time_all_reduces, options.repeats, options.sizes):
                seconds[block["way"], block["bytes"]].append(block["s"])
        add_link(report, mbit, options.sizes, seconds)
    return report


def time_all_reduces(repeats: int, sizes_mb: Sequence[int]) -> None:
    """Be a rank of `hierarchical`; rank 0 prints the time of each block."""
    dist.init_process_group("gloo")  # the engine uses it too, and leaves it standing
    for _, way in turns((FLAT, HIERARCHICAL, INSIDE), repeats):
        hvd.init(settings=hvd.EngineSettings(hierarchical_allreduce=way == HIERARCHICAL))
        for num_elements in [size_mb * 250_000 for size_mb in sizes_mb] + ([1] if way == INSIDE else []):
            say(way=way, bytes=num_elements * 4, s=time_all_reduce(way, num_elements))
        hvd.shutdown()
    dist.destroy_process_group()


def time_all_reduce(way: str, num_elements: int) -> float:
    """Return the seconds of an all-reduce on the slowest rank; every rank calls this in the same order."""
    per_node = hvd.local_size()
    tensor = torch.zeros(num_elements)
    starts = range(0, hvd.size(), per_node) if way == INSIDE else ()
    sets = [hvd.add_process_set(range(first, first + per_node)) for first in starts]
    process_set = sets[hvd.rank() // per_node] if sets else hvd.global_process_set

    def reduce() -> None:
        hvd.allreduce_(tensor, op=hvd.Sum, process_set=process_set)

    reduce()  # warm-up
    elapsed_s, _ = time_block(reduce, NUM_REDUCTIONS)
    for each in sets:
        hvd.remove_process_set(each)
    return elapsed_s


def predict(size_bytes: int, way: str, network: Link, inside_s: float, message_s: float) -> float:
    """Return the predicted seconds of an all-reduce.

    Args:
        size_bytes: size of the tensor.
        way: FLAT or HIERARCHICAL.
        network: link between the nodes.
        inside_s: measured time of an all-reduce of this size between the two ranks of a node.
        message_s: measured time of an all-reduce of one number between them.
    """
    # A ring of two ranks takes bytes / bandwidth; its latency is in `message_s`.
    inside = Link(size_bytes / max(inside_s - message_s, 1e-9))
    links = Cluster(NUM_NODES, network, RANKS_PER_NODE, inside if way == HIERARCHICAL else None, message_s)
    return all_reduce_s(size_bytes, all_ranks(links), links)


def add_link(report: Report, mbit: int, sizes_mb: list[int], seconds: dict[tuple[str, int], list[float]]) -> None:
    """Add the times of one link, flat by hierarchical, and predicted by measured."""
    message_s = seconds[INSIDE, 4]
    for size_mb in sizes_mb:
        size, name = size_mb * 1_000_000, f"{mbit} Mbit/s, {size_mb} MB"
        for way in (FLAT, HIERARCHICAL):
            report.add_row(f"{name}: {way}", "ms", [1e3 * value for value in seconds[way, size]])
        report.add_ratio(f"{name}: {FLAT} / {HIERARCHICAL}", seconds[FLAT, size], seconds[HIERARCHICAL, size])
        for way in (FLAT, HIERARCHICAL):
            predicted = [
                predict(size, way, Link(mbit * 1e6 / 8), *measured)
                for measured in zip(seconds[INSIDE, size], message_s, strict=True)
            ]
            report.add_ratio(f"{name}: predicted / measured, {way}", predicted, seconds[way, size])


@contextmanager
def shaped_nodes(bytes_per_s: float) -> Iterator[list[int]]:
    """Return a process in the namespace of each node; each node may send `bytes_per_s` to the other one.

    Exits with a message where the machine refuses namespaces.
    """
    with ExitStack() as stack:
        first, second = holders = [start_node(stack) for _ in range(NUM_NODES)]
        run_on(
            first, "ip", "link", "add", "name", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second)
        )
        for node, address in zip(holders, ADDRESSES, strict=True):
            run_on(node, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            run_on(node, "ip", "link", "set", "dev", "eth0", "up")
            limit_rate(node, "eth0", bytes_per_s)
        yield holders


@contextmanager
def delayed_nodes(bytes_per_s: float, delay_s: float) -> Iterator[list[int]]:
    """As `shaped_nodes`, with a delay of the link in each direction."""
    with ExitStack() as stack:
        holders = [start_node(stack) for _ in range(NUM_NODES)]
        command = call_command(relay, *holders, bytes_per_s, delay_s)
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(process.communicate)
        assert process.stdout is not None
        if not process.stdout.readline():
            sys.exit("this machine refuses TUN devices; run as root, with /dev/net/tun")
        for node, address in zip(holders, ADDRESSES, strict=True):
            run_on(node, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            run_on(node, "ip", "link", "set", "dev", "eth0", "mtu", "65000", "up")
        yield holders


def run_on_nodes(
    nodes: Sequence[int], ranks_per_node: int, function: Callable[..., None], *arguments: Any
) -> Iterator[dict[str, Any]]:
    """Call a function on every rank, one thread each, and yield the JSON objects that rank 0 prints, as they come."""
    size = len(nodes) * ranks_per_node
    shared = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(_PORT), "WORLD_SIZE": str(size)}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks_per_node), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(size):
        node, local_rank = divmod(rank, ranks_per_node)
        command = [*inside(nodes[node]), *call_command(function, *arguments)]
        variables = environment(**shared, RANK=str(rank), LOCAL_RANK=str(local_rank))
        output = None if rank else subprocess.PIPE
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, text=True))
    try:
        assert ranks[0].stdout is not None
        yield from map(json.loads, ranks[0].stdout)
        if any(rank.wait() for rank in ranks):
            sys.exit("a rank has failed; its error is above")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
