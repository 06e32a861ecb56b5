"""The outcomes of a GPU day as the section of docs/reference/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def make_table(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Return Markdown: each machine that stages ran on, and a table for each stage."""
    lines = []
    for machine in dict.fromkeys(map(_describe_machine, outcomes)):
        lines += [f"Machine: {machine}.", ""]
    for outcome in outcomes:
        lines += [f"### {outcome['title']}: `{outcome['command']}`", ""]
        if outcome["status"] != "done":
            lines += [f"**{outcome['status']}**: {outcome['reason']}", ""]
        figures = [*outcome.get("rows", ()), *outcome.get("ratios", ())]
        if figures:
            lines += ["| | median (min-max) | n |", "|---|---|---|", *map(_describe_figure, figures), ""]
        parts = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in outcome.get("durations_s", {}).items())
        lines += [f"It took {outcome['duration_s']:.0f} s{f': {parts}' if parts else ''}.", ""]
    return "\n".join(lines)


def _describe_machine(outcome: Mapping[str, Any]) -> str:
    device, versions, machine = (outcome.get(name) or {} for name in ("device", "versions", "machine"))
    gpu = (
        f"{device['count']} x {device['name']} ({device['memory_gib']} GiB, CUDA {device['cuda']}, "
        f"driver {device['driver']})"
        if device
        else "no GPU"
    )
    processor = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB" if machine else "unknown"
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{gpu}; {processor}; {packages}; commit {outcome.get('commit', 'unknown')}; {outcome['began'][:10]}"


def _describe_figure(figure: Mapping[str, Any]) -> str:
    low, median, high = (_number(figure[name]) for name in ("min", "median", "max"))
    unit = f", {figure['unit']}" if figure.get("unit") else ""
    spread = f" ({low}-{high})" if figure["n"] > 1 else ""
    return f"| {figure['name'].replace('|', '/')}{unit} | {median}{spread} | {figure['n']} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
