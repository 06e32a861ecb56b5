"""`datasvc plan layouts`: the command line. It is checked before torch is imported."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from datasvc.errors import ConfigError
from datasvc.planning.candidates import GLOO, GPUS, ZERO_STAGES, Choices, ExecutionTraits
from datasvc.planning.cluster import Cluster, add_cluster_options, parse_bandwidth, parse_clusters
from datasvc.planning.layout import PIPELINE_SCHEDULES, Layout
from datasvc.planning.layout_step import ComputeTimes, PlannedWork, rate_compute
from datasvc.planning.memory import state_bytes
from datasvc.planning.ranking import rank_layouts
from datasvc.planning.step import StepCosts
from datasvc.sizes import parse_size
from datasvc.trainer.launch.config_file import OneLineParser
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.settings.options import parse_options

# Settings on which the measured times depend.
_SAME_SETTINGS: Final = ("vocabulary", "precision", "optimizer", "size")


@dataclass(frozen=True)
class MeasuredStep:
    """What a plan takes from a profile.

    Attributes:
        times: compute times of one rank with the whole model.
        micro_batch: samples of the measured passes.
        message_s: fixed cost of a collective.
    """

    times: ComputeTimes
    micro_batch: int
    message_s: float


def read_measured(path: str, config: TrainConfig) -> MeasuredStep:
    """Return the measured times of a profile of the training that `config` describes.

    Raises:
        ConfigError: the file is no profile, or was measured with another model or other settings.
    """
    try:
        profile = json.loads(Path(path).read_text(encoding="utf-8"))
        costs, measured = StepCosts.from_dict(profile["costs"]), profile["config"]
        micro_batch = min(measured["micro_batch"] or costs.samples, costs.samples)
        message_s, model = float(profile["message_s"]), measured["model"]
        options = list(measured["model_option"])
        settings = {name: measured[name] for name in _SAME_SETTINGS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no profile: {error!r}; write one with python -m datasvc.trainer profile --json"
        ) from error
    _check_same(path, config, {"model": model, "model_option": options, **settings})
    times = ComputeTimes(costs.forward_s / costs.samples, costs.backward_s / costs.samples, costs.update_s)
    return MeasuredStep(times, micro_batch, message_s)


def _check_same(path: str, config: TrainConfig, measured: dict[str, Any]) -> None:
    for name, value in measured.items():
        planned: Any = getattr(config, name)
        # A profile has the name of the model even if it is the default, and lists instead of tuples.
        planned = config.model_or_default if name == "model" else planned
        planned = list(planned) if isinstance(planned, tuple) else planned
        if planned != value:
            raise ConfigError(
                f"{path} was measured with {name} {value!r}, and the plan has {planned!r}; "
                f"give --{name.replace('_', '-')} as it was measured, or another profile"
            )


_NUM_CLASSES: Final = 1000
_BACKENDS: Final = {"nccl": GPUS, "gloo": GLOO}
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGTP]?)FLOPS?(?:/s)?", re.IGNORECASE)
_FACTORS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
# Options that a training run must have, and a plan does not read.
_UNUSED: Final = ("--data", "--repo", "--name")


def main(arguments: Sequence[str], *, prog: str = "datasvc plan layouts") -> None:
    """Run `plan layouts` with the arguments of a command line, on one process.

    Args:
        arguments: arguments of the command line.
        prog: name of the program in usage messages.

    Raises:
        ConfigError: an option is not valid, or does not fit the model.
    """
    # `chosen` has the options of `plan`; all other arguments are options of the training.
    chosen, training_arguments = _make_parser(prog).parse_known_args(arguments)
    given = {argument.partition("=")[0] for argument in training_arguments}
    unused = [word for option in _UNUSED if option not in given for word in (option, "plan")]
    options = parse_options([*unused, *training_arguments], prog=prog)
    if options.show_config:
        sys.stdout.write(f"{options.describe()}\n")
        return
    config = options.config()
    _check_options(chosen, config)
    clusters, traits = parse_clusters(chosen), _choose_traits(chosen)
    measured = None if chosen.measured is None else read_measured(chosen.measured, config)
    choices = Choices(
        micro_batches=_choose_micro_batches(config, measured),
        recompute=(False, True) if chosen.recompute is None else (chosen.recompute,),
        schedules=tuple(chosen.pipeline_schedule),
        zero_stages=tuple(chosen.zero),
    )
    # Imported here, because it imports torch, which takes seconds, and all options are checked before.
    from datasvc.trainer.recipes.choose_layout import check_settings

    def check(layout: Layout) -> None:
        if not layout.is_data_only:
            check_settings(config, layout)

    rankings = [
        rank_layouts(workload, cluster, choices, check)
        for workload, cluster in _make_workloads(chosen, config, measured, clusters, traits)
    ]
    print(
        json.dumps([each.to_dict() for each in rankings])
        if chosen.json
        else "\n\n".join(each.describe(chosen.top) for each in rankings)
    )


def parse_rate(text: str) -> float:
    """Return the floating-point operations per second of "150TFLOP/s" or "150 TFLOPS". Raises ConfigError."""
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"{text!r} is not a rate of computation; write it as 150TFLOP/s or 40GFLOP/s")
    return float(match[1]) * _FACTORS[match[2].lower()]


def _make_workloads(
    chosen: argparse.Namespace,
    config: TrainConfig,
    measured: MeasuredStep | None,
    clusters: Sequence[Cluster],
    traits: ExecutionTraits,
) -> list[tuple[PlannedWork, Cluster]]:
    # Imported here, because it imports torch too.
    from datasvc.trainer.recipes.planning.count_costs import count_costs

    costs = count_costs(
        config.model_or_default,
        config.vocabulary or chosen.classes,
        config.parse_model_options(),
        tokens=chosen.block_tokens,
        size=config.size,
    )
    states = state_bytes(config.optimizer, config.precision, momentum=config.momentum)
    if measured is not None:
        times = measured.times
    else:
        memory_bytes_per_s = math.inf
        if chosen.memory_bandwidth is not None:
            memory_bytes_per_s = parse_bandwidth(chosen.memory_bandwidth)
        times = rate_compute(costs, parse_rate(chosen.flops), states=states, memory_bytes_per_s=memory_bytes_per_s)
    message_s = 0.0 if measured is None else measured.message_s
    memory_bytes = None if chosen.device_memory is None else parse_size(chosen.device_memory)
    workloads = []
    for given in clusters:
        cluster = dataclasses.replace(given, message_s=message_s)
        batch = config.global_batch or config.batch_size * cluster.world_size
        workload = PlannedWork(
            costs,
            times,
            states,
            config.precision,
            batch,
            memory_bytes=memory_bytes,
            traits=traits,
        )
        workloads.append((workload, cluster))
    return workloads


def _choose_traits(chosen: argparse.Namespace) -> ExecutionTraits:
    traits = dataclasses.replace(_BACKENDS[chosen.backend], processors_per_rank=chosen.processors_per_rank)
    return traits if chosen.overlap is None else dataclasses.replace(traits, overlap=chosen.overlap)


def _choose_micro_batches(config: TrainConfig, measured: MeasuredStep | None) -> tuple[int, ...]:
    if config.micro_batch is not None:
        return (config.micro_batch,)
    # Measured times hold for passes of the measured size: a device needs more time per sample for smaller ones.
    return () if measured is None else (measured.micro_batch,)


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=prog,
        description="Estimate memory and step time of every layout of a cluster, and rank the layouts. Nothing is "
        "trained, and no data are read. Takes the options of python -m datasvc.trainer as well: the model and its "
        "options, --vocabulary, --global-batch, --micro-batch, --precision, --optimizer, --size.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_cluster_options(parser, num_nodes=(1,), default_help="1")
    add("--gpus", type=int, dest="ranks_per_node", default=argparse.SUPPRESS, help="the same as --ranks-per-node")
    add("--device-memory", metavar="SIZE", help="memory of a device, such as 80GB [not limited]")
    add("--flops", metavar="RATE", help="rate of a device in training, such as 150TFLOP/s; or give --measured")
    add(
        "--memory-bandwidth",
        metavar="RATE",
        help="memory bandwidth of a device, such as 2TB/s, for the time of the update [the update takes no time]",
    )
    add("--measured", metavar="FILE", help="profile of this model, written by profile --json: its measured times")
    add("--block-tokens", type=int, metavar="N", help="tokens of a sample [the model's context]")
    add("--classes", type=int, default=_NUM_CLASSES, metavar="N", help="classes of images [%(default)s]")
    _add_choices(parser)
    add("--top", type=int, default=10, metavar="N", help="number of layouts to print [%(default)s]")
    add("--json", action="store_true", help="print one JSON array, with an object for each number of nodes")
    return parser


def _add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the options for how a layout is executed: those of `Choices` and `ExecutionTraits`."""
    add = parser.add_argument
    add(
        "--recompute",
        action=argparse.BooleanOptionalAction,
        help="compute blocks again in the backward pass, to save memory [try both]",
    )
    add(
        "--zero",
        type=int,
        nargs="+",
        choices=ZERO_STAGES,
        default=ZERO_STAGES,
        help="ZeRO stages of the axis shard to try [all]",
    )
    add(
        "--pipeline-schedule",
        nargs="+",
        choices=PIPELINE_SCHEDULES,
        default=PIPELINE_SCHEDULES,
        help="schedules of pipelines to try [all]",
    )
    add(
        "--backend",
        choices=list(_BACKENDS),
        default="nccl",
        help="how the ranks communicate; with gloo, collectives need the processors that compute, and a "
        "reduce-scatter is an all-reduce [%(default)s]",
    )
    add(
        "--overlap",
        type=float,
        metavar="SHARE",
        help="share of the computation during which collectives of gradients and parameters make progress, from 0 "
        "to 1 [1 with nccl, 0 with gloo]",
    )
    add(
        "--processors-per-rank",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="processors that a rank has, at most 1: 0.5 if two ranks share one. The rate or the measured times must "
        "then be those of ranks that all compute at the same time [%(default)s]",
    )


def _check_options(chosen: argparse.Namespace, config: TrainConfig) -> None:
    if config.profile is not None:
        raise ConfigError("--profile is an option of training runs; use --measured FILE for the profile of a step")
    if config.layout is not None:
        raise ConfigError("plan ranks all layouts; leave out --layout")
    for name in ("offload", "offload_activations"):
        if getattr(config, name):
            raise ConfigError(f"plan does not estimate --{name.replace('_', '-')}; leave it out")
    if (chosen.flops is None) == (chosen.measured is None):
        raise ConfigError(
            "give either --flops, the rate of a device, such as 150TFLOP/s, or --measured, a file that "
            "python -m datasvc.trainer profile --json wrote"
        )
    if chosen.measured is not None and chosen.memory_bandwidth is not None:
        raise ConfigError("--memory-bandwidth has no effect with --measured, which has the time of the update")
    for name in ("block_tokens", "classes", "top"):
        value = getattr(chosen, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; expected at least 1")
    # Parsed here for their errors, before torch is imported.
    if chosen.flops is not None:
        parse_rate(chosen.flops)
    if chosen.memory_bandwidth is not None:
        parse_bandwidth(chosen.memory_bandwidth)
    if chosen.device_memory is not None:
        parse_size(chosen.device_memory)
