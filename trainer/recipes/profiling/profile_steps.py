"""Measures the steps of a run part by part, and predicts their time on other clusters.

`measure/` runs and times steps; `datasvc/planning/prediction.py` computes the duration of a step from their costs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import Progress

import datasvc.trainer as hvd
from datasvc.loaders.profiling.step_times import TimeSpan
from datasvc.planning.cluster import Cluster
from datasvc.planning.prediction import predict
from datasvc.planning.step import StepMode
from datasvc.trainer.recipes.build import compile_model
from datasvc.trainer.recipes.profiling.measure.compressions import measure_compressions
from datasvc.trainer.recipes.profiling.measure.layers import Layers, measure_layers
from datasvc.trainer.recipes.profiling.measure.measure import Bench
from datasvc.trainer.recipes.profiling.measure.messages import measure_traffic
from datasvc.trainer.recipes.profiling.measure.profile import Profile
from datasvc.trainer.recipes.profiling.measure.profiled_run import open_profiled_run
from datasvc.trainer.recipes.settings.config import TrainConfig


def profile_steps(
    config: TrainConfig,
    clusters: Sequence[Cluster],
    *,
    steps: int,
    rounds: int,
    checks_modes: bool,
    compressions: Sequence[str] = (),
) -> tuple[Profile, list[TimeSpan]]:
    """Return the profile of steps on this rank, and the spans of its trace. Every rank must call this.

    Args:
        config: settings of the training.
        clusters: clusters to predict the time of a step for.
        steps: number of steps in a timed block.
        rounds: number of timed blocks.
        checks_modes: whether to also time the step in every `StepMode`, to compare with the prediction.
        compressions: values of `--compression` to predict a step with, on the links of this job.

    Raises:
        ConfigError, NotFoundError, CacheFullError: the settings do not fit the data.
        HorovodInternalError: a rank died.
    """
    modes = tuple(StepMode) if checks_modes else ()
    # One for the layers, one for the messages; then in each round, one for the round and one per mode.
    num_measurements = 2 + rounds * (1 + len(modes))
    with open_profiled_run(config) as run, _progress_bar(num_measurements) as advance:
        bench = Bench(run)
        batch = next(run.loaders)
        # Before the compilation, which hides the layers.
        layers = measure_layers(run, batch, steps)
        advance()
        compile_model(run.model, run.config.compile)
        traffic = measure_traffic(run, batch, steps)
        advance()
        measured = []
        for number in range(rounds):
            this_round = bench.measure_round(traffic, steps)
            spans = _trace_spans(layers, bench.spans)
            advance()
            measured_s = {}
            # Every other round runs the modes in reverse order, so that a machine that becomes slower or faster
            # favours no mode.
            for mode in modes if number % 2 == 0 else reversed(modes):
                measured_s[mode] = bench.run(mode, steps)
                advance()
            measured.append(dataclasses.replace(this_round, measured_s=measured_s))
        reduces = measure_compressions(run, compressions)
    profile = Profile(hvd.size(), run.config, run.task.unit, measured, layers, traffic, reduces=reduces)
    # On the predicted clusters a message is assumed to have the fixed cost that it has here.
    clusters = [dataclasses.replace(cluster, message_s=traffic.message_s) for cluster in clusters]
    predictions = [predict(profile.costs, cluster) for cluster in clusters]
    return dataclasses.replace(profile, predictions=predictions), spans


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


@contextlib.contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on rank 0's standard error if that is a terminal; yield the function that advances it."""
    console = Console(stderr=True)
    with Progress(console=console, disable=hvd.rank() != 0 or not console.is_terminal, transient=True) as progress:
        task = progress.add_task("profiling", total=total)
        yield lambda: progress.advance(task)
