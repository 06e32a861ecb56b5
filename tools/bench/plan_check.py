"""Estimated by measured step time of layouts, on ranks of this machine."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import datasvc.trainer as hvd
from datasvc.planning.candidates import GLOO, Candidate, Choices, ExecutionTraits
from datasvc.planning.cluster import Cluster, Link
from datasvc.planning.layout_step import ComputeTimes, PlannedWork, estimate_step
from datasvc.planning.memory import state_bytes
from datasvc.planning.model_costs import ModelCosts, transformer_costs
from datasvc.planning.ranking import rank_layouts
from datasvc.threads import count_processors
from datasvc.trainer.recipes.layouts.divided_model import LayoutOptions, apply_layout
from datasvc.trainer.recipes.layouts.tensor import divide_layers, find_tensor_plan
from datasvc.trainer.recipes.models.gpt import GPT
from tools.bench.ranks import Step, say, time_block
from tools.bench.runner import Options, Report, bench, run_ranks, turns

NUM_BEST = 3
LAYERS, HEADS, WIDTH, VOCABULARY = 4, 4, 512, 512
MICRO_BATCH, PASSES_PER_RANK = 1, 2
STATES = state_bytes("adamw", "fp32")
SMALL, LARGE = 1, 1 << 20  # float32 numbers
NUM_COLLECTIVES = 10

Seconds = Mapping[str, Sequence[float]]


@bench(
    repeats=7,
    steps=(1, "of a block that is timed"),
    layouts=(8, "best of the ranking to run"),
    ranks=4,
    tokens=(16, "of a block"),
    beside={"metavar": "LAYOUT", "help": "compare the measured times with those of this layout"},
    strict={"action": "store_true", "help": "fail if the order of the best three is another one"},
)
def plan_check(options: Options) -> Iterator[Report]:
    """Estimated by measured step time of the layouts that `datasvc plan layouts` ranks first, on four ranks.

    A small GPT with many parameters for its tokens, so that layouts differ in what they send; gloo over the loopback.
    Every round measures compute times and the loopback, estimates the step of each layout from them, and runs the
    steps of all layouts in turn, so that other load of the machine is in both. The ranking is that of the medians.

    With `--beside data=2`, each layout is also compared with that one: measured time / its measured time. With
    `--strict` the status is 1 if the best three layouts are estimated in another order than they were measured.
    """
    measured, estimated = defaultdict(list), defaultdict(list)
    counts = (options.repeats, options.steps, options.layouts, options.tokens)
    for line in run_ranks(compare_layouts, options.ranks, *counts):
        measured[line["layout"]].append(line["measured_s"])
        estimated[line["layout"]].append(line["estimated_s"])
    if options.beside is not None and options.beside not in measured:
        sys.exit(f"no layout {options.beside} among those that ran: {'; '.join(measured)}")
    best, expected = rank_medians(measured)[:NUM_BEST], rank_medians(estimated)[:NUM_BEST]
    report = Report(
        f"{options.ranks} ranks of one thread, gloo over the loopback",
        f"best measured: {'; '.join(best)}\nbest estimated: {'; '.join(expected)}",
    )
    for layout in rank_medians(measured):
        report.add_row(f"{layout}: measured", "ms/step", [1e3 * seconds for seconds in measured[layout]])
        report.add_row(f"{layout}: estimated", "ms/step", [1e3 * seconds for seconds in estimated[layout]])
        report.add_ratio(f"{layout}: estimated / measured", estimated[layout], measured[layout])
        if options.beside not in (None, layout):
            report.add_ratio(f"{layout} / {options.beside}: measured", measured[layout], measured[options.beside])
    yield report
    if options.strict and best != expected:
        sys.exit(f"measured: {'; '.join(best)}; estimated: {'; '.join(expected)}")


def rank_medians(seconds: Seconds) -> list[str]:
    """Return the layouts, the one with the shortest median first."""
    return sorted(seconds, key=lambda layout: statistics.median(seconds[layout]))


def build_model(block: int) -> GPT:
    """Return the model of blocks of `block` tokens, equal on all ranks."""
    torch.manual_seed(0)
    return GPT(VOCABULARY, context=block, layers=LAYERS, heads=HEADS, width=WIDTH, dropout=0.0)


def sum_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of all tokens."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


def make_step(candidate: Candidate, block: int) -> Step:
    """Return a step of a candidate, with a model of its own. Every rank calls this in the same order."""
    model, layout = build_model(block), candidate.layout
    batch = candidate.micro_batch * candidate.num_micro_batches
    tokens, targets = torch.randint(VOCABULARY, (2, batch, block)).unbind()
    if layout.is_data_only:
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters()),
            model.named_parameters(),
            backward_passes_per_step=candidate.num_micro_batches,
        )
        return lambda: run_passes(model, optimizer, tokens, targets, candidate.micro_batch)
    divided = apply_layout(
        model,
        layout,
        LayoutOptions(candidate.schedule, candidate.zero or 3, candidate.recompute),
        rank=hvd.rank(),
        device=torch.device("cpu"),
        num_micro_batches=candidate.num_micro_batches,
        block=block,
    )
    # A foreach kernel needs tensors of one mesh.
    optimizer = torch.optim.AdamW(divided.model.parameters(), foreach=False if layout.tensor > 1 else None)
    pipeline, split = divided.pipeline, divided.split
    if split is not None:
        tokens, targets = (each[:, split.start : split.start + split.num_tokens] for each in (tokens, targets))
    if pipeline is None:
        return lambda: run_passes(divided.model, optimizer, tokens, targets, candidate.micro_batch)

    def step() -> None:
        optimizer.zero_grad()
        pipeline.step(tokens, targets, {}, sum_loss)
        divided.sum_gradients()
        optimizer.step()

    return step


def run_passes(model: Any, optimizer: Any, tokens: torch.Tensor, targets: torch.Tensor, micro_batch: int) -> None:
    """Take a step whose gradients are added over the passes."""
    optimizer.zero_grad()
    for inputs, expected in zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True):
        sum_loss(model(inputs), expected).backward()
    optimizer.step()


class Parts:
    """Measures what a plan needs: the passes and the update of the whole model on every rank, and the link."""

    def __init__(self, block: int) -> None:
        self._model = build_model(block)
        self._num_tokens = block
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._tokens, self._targets = torch.randint(VOCABULARY, (2, MICRO_BATCH, block)).unbind()
        # A block of its own that is divided over one rank, so that it is dispatched as divided ones are.
        divided = GPT(VOCABULARY, context=block, layers=1, heads=HEADS, width=WIDTH, dropout=0.0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("all", "tensor"))
        divide_layers(divided, find_tensor_plan(divided), mesh["tensor"])
        self._divided = divided.blocks[0]

    def measure(self) -> tuple[ComputeTimes, Link]:
        """Return the compute times, means over the ranks, and the link. All ranks compute at the same time."""
        times = torch.zeros(3, dtype=torch.float64)
        dist.barrier()
        for _ in range(NUM_COLLECTIVES):
            marks = [time.perf_counter()]
            loss = sum_loss(self._model(self._tokens), self._targets)
            marks.append(time.perf_counter())
            loss.backward()
            marks.append(time.perf_counter())
            self._optimizer.step()
            marks.append(time.perf_counter())
            self._optimizer.zero_grad()
            times += torch.tensor(marks, dtype=torch.float64).diff() / NUM_COLLECTIVES
        dist.all_reduce(times)
        forward_s, backward_s, update_s = (times / dist.get_world_size()).tolist()
        computed = ComputeTimes(forward_s / MICRO_BATCH, backward_s / MICRO_BATCH, update_s, self._measure_dispatch())
        return computed, self._measure_link()

    def _measure_dispatch(self) -> float:
        stream = torch.zeros(MICRO_BATCH, self._num_tokens, WIDTH)
        plain_s, divided_s = (
            time_block(lambda block=block: block(stream, None).sum().backward(), NUM_COLLECTIVES)[0]
            for block in (self._model.blocks[0], self._divided)
        )
        self._optimizer.zero_grad()
        return max(0.0, divided_s - plain_s)

    def _measure_link(self) -> Link:
        """Return the latency and the bandwidth for which rings of two sizes take as long as measured.

        The small one is measured between computations of a block, as in a step: ranks then wait for the slowest one.
        """
        size = dist.get_world_size()
        block, stream = self._model.blocks[0], torch.zeros(MICRO_BATCH, self._num_tokens, WIDTH)
        small, large = torch.zeros(SMALL), torch.zeros(LARGE)

        def compute() -> None:
            block(stream, None)

        def compute_and_reduce() -> None:
            compute()
            dist.all_reduce(small)

        alone_s = time_block(compute, NUM_COLLECTIVES)[0]
        small_s = max(1e-6, time_block(compute_and_reduce, NUM_COLLECTIVES)[0] - alone_s)
        large_s = time_block(lambda: dist.all_reduce(large), NUM_COLLECTIVES)[0]
        bare_s = time_block(lambda: dist.all_reduce(small), NUM_COLLECTIVES)[0]
        sent_bytes = 2 * (size - 1) / size * LARGE * 4
        return Link(sent_bytes / max(large_s - bare_s, 1e-6), small_s / (2 * (size - 1)))


def estimate(costs: ModelCosts, candidate: Candidate, times: ComputeTimes, link: Link) -> float:
    """Return the estimated seconds of a step."""
    cluster = Cluster(1, link, dist.get_world_size())
    return estimate_step(plan_work(costs, times), candidate, cluster).step_s


def plan_work(costs: ModelCosts, times: ComputeTimes) -> PlannedWork:
    """Return the training run of all ranks."""
    global_batch = MICRO_BATCH * PASSES_PER_RANK * dist.get_world_size()
    return PlannedWork(costs, times, STATES, "fp32", global_batch, traits=choose_traits())


def choose_traits() -> ExecutionTraits:
    """Return how the ranks compute and communicate. Each computes in one thread."""
    return dataclasses.replace(GLOO, processors_per_rank=min(1.0, count_processors() / dist.get_world_size()))


def choose_candidates(costs: ModelCosts, times: ComputeTimes, link: Link, number: int) -> list[Candidate]:
    """Return the candidates of the best layouts of the ranking, equal on all ranks."""
    choices = Choices((MICRO_BATCH,), recompute=(False,), schedules=("1f1b",), zero_stages=(2, 3))
    ranking = rank_layouts(plan_work(costs, times), Cluster(1, link, dist.get_world_size()), choices)
    chosen = [[each.candidate for each in ranking.ranked[:number]]]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def compare_layouts(repeats: int, num_steps: int, num_layouts: int, block: int) -> None:
    """Be a rank: measure and estimate all layouts in every round; rank 0 prints both."""
    dist.init_process_group("gloo")
    hvd.init()
    costs = transformer_costs("gpt", layers=LAYERS, heads=HEADS, width=WIDTH, vocabulary=VOCABULARY, tokens=block)
    parts = Parts(block)
    parts.measure()
    candidates = choose_candidates(costs, *parts.measure(), num_layouts)
    steps = {candidate: make_step(candidate, block) for candidate in candidates}
    for step in steps.values():
        step()
    number = -1
    for repeat, candidate in turns(steps, repeats):
        if repeat != number:
            number, (times, link) = repeat, parts.measure()
        measured_s, _ = time_block(steps[candidate], num_steps)
        say(layout=str(candidate.layout), measured_s=measured_s, estimated_s=estimate(costs, candidate, times, link))
    hvd.shutdown()
    dist.destroy_process_group()
