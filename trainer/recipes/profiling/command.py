"""`python -m datasvc.trainer profile`: measures a step part by part, and predicts its time on other clusters.

`measure/` runs and times steps. `predict/` computes the duration of a step from the measured costs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.loaders.profiling.step_times import TimeSpan
from datasvc.loaders.profiling.trace import write_trace
from datasvc.trainer.recipes import random_state
from datasvc.trainer.recipes.profiling.measure.layers import Layers, measure_layers
from datasvc.trainer.recipes.profiling.measure.measure import Bench
from datasvc.trainer.recipes.profiling.measure.messages import measure_traffic
from datasvc.trainer.recipes.profiling.measure.profile import Profile
from datasvc.trainer.recipes.profiling.measure.profiled_run import open_profiled_run
from datasvc.trainer.recipes.profiling.predict.cluster import Cluster, add_cluster_options, parse_clusters
from datasvc.trainer.recipes.profiling.predict.predict import predict
from datasvc.trainer.recipes.profiling.predict.step_time import StepMode
from datasvc.trainer.recipes.reporting.trace_path import trace_path
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.settings.options import parse_options
from datasvc.trainer.recipes.start import compile_model

PROG = "python -m datasvc.trainer profile"


def main(arguments: Sequence[str]) -> None:
    """Run `profile` with the arguments of a command line; rank 0 prints the result. Every rank calls this.

    Raises:
        ConfigError, NotFoundError, CacheFullError: the settings do not fit the data.
        HorovodInternalError: a rank died.
    """
    # `chosen` has the options of `profile`; all other arguments are options of the training.
    chosen, training_arguments = _make_parser().parse_known_args(arguments)
    # A profile writes no checkpoints, but `TrainConfig` requires a name for them.
    options = parse_options(["--name", "profile", *training_arguments], prog=PROG)
    if options.show_config:
        sys.stdout.write(f"{options.describe()}\n")
        return
    config = options.config()
    # All options are checked before the ranks connect and data are opened.
    _check_options(chosen, config)
    clusters = parse_clusters(chosen)
    hvd.init()
    random_state.seed_all(config.seed)
    try:
        rank = hvd.rank()
        profile, spans = _measure(config, chosen, clusters)
    finally:
        hvd.shutdown()
    if rank == 0:
        print(json.dumps(profile.to_dict()) if chosen.json else profile.describe(chosen.top), flush=True)
    # Every rank writes its trace after the result is printed. A full disk must not lose a result that took minutes.
    if chosen.trace is not None:
        path = trace_path(chosen.trace, rank=rank, num_ranks=profile.world_size)
        write_trace(path, spans, process_name=f"{profile.config.model}, rank {rank}")


def _trace_spans(layers: Layers, parts: Sequence[TimeSpan]) -> list[TimeSpan]:
    """Return the spans of the trace: the parts of one step, and the layers of another step, which ran with hooks."""
    # Move the layers in time, so that the forward passes of the two steps start together.
    origin_ns = next(span.start_ns for span in parts if span.name == "forward")
    spans = list(parts)
    for layer in layers.spans:
        # A trace has a row per thread. The parts are in row 1; the layers get rows of their own.
        row = (3, "layers, backward, with hooks") if layer.is_backward else (2, "layers, forward, with hooks")
        start_ns = origin_ns + round(layer.start_s * 1e9)
        spans.append(TimeSpan(layer.name, *row, start_ns, round(layer.duration_s * 1e9), 1))
    return spans


def _measure(
    config: TrainConfig, chosen: argparse.Namespace, clusters: Sequence[Cluster]
) -> tuple[Profile, list[TimeSpan]]:
    """Return the profile, and the spans of this rank's trace. Every rank calls this."""
    modes = tuple(StepMode) if chosen.check else ()
    num_measurements = 2 + chosen.rounds * (
        1 + len(modes)
    )  # the layers, the messages, then each round with its modes
    with open_profiled_run(config) as run, _progress_bar(num_measurements) as advance:
        bench = Bench(run)
        batch = next(run.loaders)
        # Before the compilation, which hides the layers.
        layers = measure_layers(run, batch, chosen.steps)
        advance()
        compile_model(run.model, run.config.compile)
        traffic = measure_traffic(run, batch, chosen.steps)
        advance()
        rounds = []
        for number in range(chosen.rounds):
            this_round = bench.measure_round(traffic, chosen.steps)
            spans = _trace_spans(layers, bench.spans)
            advance()
            measured_s = {}
            # Every other round runs the modes in reverse order, so that a machine that becomes slower or faster
            # favours no mode.
            for mode in modes if number % 2 == 0 else reversed(modes):
                measured_s[mode] = bench.run(mode, chosen.steps)
                advance()
            rounds.append(dataclasses.replace(this_round, measured_s=measured_s))
    profile = Profile(hvd.size(), run.config, run.task.unit, rounds, layers, traffic)
    # On the predicted clusters a message is assumed to have the fixed cost that it has here.
    clusters = [dataclasses.replace(cluster, message_s=traffic.message_s) for cluster in clusters]
    predictions = [predict(profile.costs, cluster) for cluster in clusters]
    return dataclasses.replace(profile, predictions=predictions), spans


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Measure what a training step costs, part by part, and predict it for other clusters. "
        "Takes the options of python -m datasvc.trainer as well, of which --data and --repo must be given.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of a timed block [%(default)s]")
    parser.add_argument(
        "--rounds", type=int, default=3, help="timed blocks; medians over them are printed [%(default)s]"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also run the step serial, prefetched and overlapped, and compare with the prediction",
    )
    parser.add_argument("--top", type=int, default=10, help="number of slowest layers to print [%(default)s]")
    add_cluster_options(parser, num_nodes=(), default_help="none: nothing is predicted")
    parser.add_argument("--trace", metavar="FILE", help="write a step as a Chrome trace, one file per rank")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _check_options(chosen: argparse.Namespace, config: TrainConfig) -> None:
    if config.profile is not None:
        raise ConfigError("--profile is an option of training runs; use --trace FILE to write a trace of one step")
    for name in ("steps", "rounds", "top"):
        if getattr(chosen, name) < 1:
            raise ConfigError(f"{name} is {getattr(chosen, name)}; expected at least 1")
    if chosen.trace is not None and not Path(chosen.trace).absolute().parent.is_dir():
        raise ConfigError(f"trace is {chosen.trace!r}, and its folder does not exist; create the folder first")


@contextlib.contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on rank 0's standard error if that is a terminal; yield the function that advances it."""
    console = Console(stderr=True)
    with Progress(console=console, disable=hvd.rank() != 0 or not console.is_terminal, transient=True) as progress:
        task = progress.add_task("profiling", total=total)
        yield lambda: progress.advance(task)
