"""Ranks the layouts of a training run on a cluster by the estimated duration of a step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from datasvc.errors import ConfigError
from datasvc.planning.candidates import Candidate, Choices, enumerate_candidates, enumerate_layouts
from datasvc.planning.cluster import Cluster
from datasvc.planning.layout import Layout, ModelSizes
from datasvc.planning.layout_step import PlannedWork, StepEstimate, estimate_step
from datasvc.planning.memory import RankMemory, estimate_memory
from datasvc.printable import count_text
from datasvc.sizes import format_size

_HEADINGS = ("compute", "tensor", "context", "send", "idle", "shard", "data", "update")


@dataclass(frozen=True)
class RankedLayout:
    """A layout that fits, with its fastest candidate.

    Attributes:
        candidate: layout and settings.
        step: duration of a step, by part.
        memory: memory of the rank that needs most.
    """

    candidate: Candidate
    step: StepEstimate
    memory: RankMemory

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        candidate = {**dataclasses.asdict(self.candidate), "layout": str(self.candidate.layout)}
        return {
            **candidate,
            "step_s": self.step.step_s,
            "step": dataclasses.asdict(self.step),
            "memory_bytes": self.memory.total,
            "memory": dataclasses.asdict(self.memory),
        }


@dataclass(frozen=True)
class RefusedLayout:
    """A layout that cannot run.

    Attributes:
        layout: the layout.
        reason: what it does not divide evenly, how much memory it needs, or another rule that it breaks.
        memory_bytes: least memory that it needs, if it needs too much; None for other reasons.
    """

    layout: Layout
    reason: str
    memory_bytes: float | None = None


@dataclass(frozen=True)
class LayoutRanking:
    """All layouts of a cluster: those that fit, by speed, and the others with reasons.

    Attributes:
        cluster: the cluster.
        workload: the training run.
        ranked: layouts that fit; the shortest step is first.
        refused: layouts that do not fit.
    """

    cluster: Cluster
    workload: PlannedWork
    ranked: Sequence[RankedLayout]
    refused: Sequence[RefusedLayout]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        costs, batch = self.workload.costs, self.workload.global_batch
        return {
            "num_nodes": self.cluster.num_nodes,
            "ranks_per_node": self.cluster.ranks_per_node,
            "model": costs.name,
            "parameters": costs.parameters,
            "forward_flops": costs.forward_flops,
            "global_batch": batch,
            "ranked": [{**each.to_dict(), "samples_per_s": batch / each.step.step_s} for each in self.ranked],
            "refused": [{"layout": str(each.layout), "reason": each.reason} for each in self.refused],
        }

    def describe(self, top: int) -> str:
        """Return a table of the `top` fastest layouts, why others do not fit, and the flags of the best one."""
        costs, workload = self.workload.costs, self.workload
        model = f"{costs.name}, {costs.parameters / 1e6:,.1f} M parameters, {workload.precision}"
        lines = [
            f"{model}; {workload.global_batch:,} {costs.unit} per step",
            f"number of nodes: {self.cluster.num_nodes}; {self.cluster.describe()}",
        ]
        if self.ranked:
            lines += ["", *self._table(top)]
        if self.refused:
            lines += ["", *self._refusals()]
        lines += ["", self._advice()]
        return "\n".join(lines)

    def _table(self, top: int) -> list[str]:
        rows = [_row(number, each, self.workload.global_batch) for number, each in enumerate(self.ranked[:top], 1)]
        # Parts that are 0 in all rows are left out.
        shown = [
            index
            for index, name in enumerate(_HEADINGS)
            if any(getattr(each.step, f"{name}_s") for each in self.ranked[:top])
        ]
        names = ["", "layout", "settings", "memory", "ms/step", f"{self.workload.costs.unit}/s"]
        table = [names + [f"{_HEADINGS[index]} ms" for index in shown]]
        for row, each in zip(rows, self.ranked[:top], strict=True):
            parts_s = dataclasses.astuple(each.step)
            table.append(row + [f"{parts_s[index] * 1e3:,.2f}" for index in shown])
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if column in (1, 2) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in table
        ]
        num_others = len(self.ranked) - len(rows)
        return [*lines, *([f"and {num_others} more that fit"] if num_others else [])]

    def _refusals(self) -> list[str]:
        """Return one line for each kind of reason: layouts with the same problem differ in the numbers only."""
        kinds: dict[str, list[RefusedLayout]] = {}
        for each in self.refused:
            kind = re.sub(r"\d+(\.\d+)?(, )?", "", re.sub(r"layout \S+", "layout", each.reason))
            kinds.setdefault("memory" if each.memory_bytes is not None else kind, []).append(each)
        lines = [f"{count_text(len(self.refused), 'layout does', 'layouts do')} not fit:"]
        for group in sorted(kinds.values(), key=len, reverse=True):
            # The example is the layout that needs the least memory: it is the closest to fitting.
            example = min(group, key=lambda each: each.memory_bytes or 0)
            lines.append(f"  {len(group)}, such as {example.layout}: {example.reason}")
        return lines

    def _advice(self) -> str:
        if not self.ranked:
            return "no layout fits; use more ranks, a smaller batch or model, or devices with more memory"
        return f"best: {_flags(self.ranked[0].candidate, self.workload.global_batch)}"


def rank_layouts(
    workload: PlannedWork, cluster: Cluster, choices: Choices, check: Callable[[Layout], None] = lambda _layout: None
) -> LayoutRanking:
    """Return all layouts of a cluster, with the fastest candidate of each that fits into memory.

    Args:
        workload: the training run.
        cluster: nodes and links.
        choices: settings to try with each layout.
        check: function that raises ConfigError for a layout with which the training does not run.
    """
    ranked, refused = [], []
    for layout in enumerate_layouts(cluster.world_size):
        try:
            check(layout)
        except ConfigError as error:
            refused.append(RefusedLayout(layout, str(error)))
            continue
        result = _choose_candidate(layout, workload, cluster, choices)
        if isinstance(result, RankedLayout):
            ranked.append(result)
        else:
            refused.append(result)
    ranked.sort(key=lambda each: (each.step.step_s, each.memory.total))
    return LayoutRanking(cluster, workload, ranked, refused)


def _choose_candidate(
    layout: Layout, workload: PlannedWork, cluster: Cluster, choices: Choices
) -> RankedLayout | RefusedLayout:
    costs = workload.costs
    sizes = ModelSizes()
    if costs.heads:
        sizes = ModelSizes(costs.layers, costs.heads, costs.width, costs.tokens, splits_tokens=True)
    candidates, reason = enumerate_candidates(
        layout, global_batch=workload.global_batch, sizes=sizes, choices=choices
    )
    if not candidates:
        return RefusedLayout(layout, reason)
    memories = [
        (candidate, estimate_memory(costs, candidate, workload.states, precision=workload.precision))
        for candidate in candidates
    ]
    limit_bytes = workload.memory_bytes
    fitting = [each for each in memories if limit_bytes is None or each[1].total <= limit_bytes]
    if not fitting:
        candidate, memory = min(memories, key=lambda each: each[1].total)
        assert limit_bytes is not None
        reason = (
            f"needs {format_size(memory.total)} with {_describe_settings(candidate)}, and a device has "
            f"{format_size(limit_bytes)}: {memory.describe()}"
        )
        return RefusedLayout(layout, reason, memory.total)
    estimated = [
        RankedLayout(
            candidate,
            estimate_step(workload, candidate, cluster),
            memory,
        )
        for candidate, memory in fitting
    ]
    # Of equal estimates, take larger passes: devices are faster with them, which the estimate leaves out.
    return min(estimated, key=lambda each: (each.step.step_s, -each.candidate.micro_batch, each.memory.total))


def _row(number: int, each: RankedLayout, global_batch: int) -> list[str]:
    seconds = each.step.step_s
    return [
        f"{number}",
        str(each.candidate.layout),
        _describe_settings(each.candidate),
        format_size(each.memory.total),
        f"{seconds * 1e3:,.2f}",
        f"{global_batch / seconds:,.1f}",
    ]


def _describe_settings(candidate: Candidate) -> str:
    """Return the settings that have an effect: "4 x 2, 1f1b, recompute"."""
    parts = [f"{candidate.num_micro_batches} x {candidate.micro_batch}"]
    parts += [candidate.schedule] * (candidate.layout.pipeline > 1)
    parts += [f"zero {candidate.zero}"] * (candidate.layout.shard > 1)
    parts += ["recompute"] * candidate.recompute
    return ", ".join(parts)


def _flags(candidate: Candidate, global_batch: int) -> str:
    """Return the options of the training program for a candidate."""
    # The training counts --batch-size per data rank, so the samples of a step would depend on the layout.
    flags = [
        f"--layout {candidate.layout}",
        f"--global-batch {global_batch}",
        f"--micro-batch {candidate.micro_batch}",
    ]
    flags += [f"--pipeline-schedule {candidate.schedule}"] * (candidate.layout.pipeline > 1)
    flags += [f"--zero {candidate.zero}"] * (candidate.layout.shard > 1)
    flags += ["--recompute"] * candidate.recompute
    return " ".join(flags)
