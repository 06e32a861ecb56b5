"""Prometheus metrics of the speed and the waits of loaders.

A job exports them with `serve_loader_metrics(9100, {"train": loader})`, or from its own registry with
`registry.register(LoaderCollector({"train": loader}))`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from datasvc.errors import ConfigError
from datasvc.loaders.profiling.report import Report
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage, Totals

# Name, help text and function of the value, of each metric.
_COUNTERS: Final[tuple[tuple[str, str, Callable[[Totals], float]], ...]] = (
    ("steps", "Batches handed over", lambda totals: totals.num_steps),
    ("samples", "Samples handed over", lambda totals: totals.num_samples),
    ("wait_seconds", "Seconds that the consumer waited", lambda totals: totals.wait_s),
    ("consumer_seconds", "Seconds between a batch and the next call", lambda totals: totals.consumer_s),
)
_GAUGES: Final[tuple[tuple[str, str, Callable[[Report], float]], ...]] = (
    ("offered", "Samples per second handed over", lambda report: report.bottleneck.offered),
    ("asked", "Samples per second that the consumer would take", lambda report: report.bottleneck.asked or 0.0),
    ("starved_ratio", "Share of the time that the consumer waited", lambda report: report.bottleneck.starved_share),
    ("wait_p95_seconds", "95th percentile of the waits of the last steps", lambda report: report.wait_p95_s),
)


class MeasuredLoader(Protocol):
    """What the metrics need of a loader."""

    profiler: StepProfiler

    def report(self) -> Report:
        """Return the report of the steps since `restart_report`."""


class LoaderCollector(Collector):
    """Metrics of loaders: counters over all steps, gauges over the steps since the last `restart_report`.

    Args:
        loaders: loaders by the value of the label `loader`. Metrics per stage have the label `stage` too.
    """

    def __init__(self, loaders: Mapping[str, MeasuredLoader]) -> None:
        self._loaders = dict(loaders)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        # Count all steps, also those before `restart_report`: a Prometheus counter must not decrease.
        totals = {name: loader.profiler.totals(whole=True) for name, loader in self._loaders.items()}
        reports = {name: loader.report() for name, loader in self._loaders.items()}
        for metric, text, count_of in _COUNTERS:
            counter = CounterMetricFamily(f"datasvc_loader_{metric}", text, labels=["loader"])
            for name, loader_totals in totals.items():
                counter.add_metric([name], count_of(loader_totals))
            yield counter
        for metric, text, value_of in _GAUGES:
            gauge = GaugeMetricFamily(f"datasvc_loader_{metric}", text, labels=["loader"])
            for name, report in reports.items():
                gauge.add_metric([name], value_of(report))
            yield gauge
        yield _make_stage_counter(
            "blocked_seconds", "Seconds that the consumer waited, by stage", totals, lambda times: times.blocked_s
        )
        yield _make_stage_counter(
            "beside_seconds", "Seconds of work in other threads, by stage", totals, lambda times: times.beside_s
        )


def serve_loader_metrics(port: int, loaders: Mapping[str, MeasuredLoader]) -> Callable[[], None]:
    """Serve the metrics of loaders at `http://HOST:port/metrics` from a thread; return the function that ends this.

    Args:
        port: port on all addresses of this machine; 0 for a free one.
        loaders: see `LoaderCollector`.

    Raises:
        ConfigError: another process listens on the port, or it may not be used.
    """
    registry = CollectorRegistry()
    registry.register(LoaderCollector(loaders))
    try:
        server, thread = start_http_server(port, registry=registry)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot serve the metrics of the loaders on port {port}: {error}; choose another"
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _make_stage_counter(
    metric: str, text: str, totals: Mapping[str, Totals], seconds_of: Callable[[Totals], Mapping[Stage, float]]
) -> Metric:
    """Return a counter with the seconds of each loader and stage; 0 for a stage that took no time."""
    family = CounterMetricFamily(f"datasvc_loader_{metric}", text, labels=["loader", "stage"])
    for name, loader_totals in totals.items():
        for stage in Stage:
            family.add_metric([name, stage.value], seconds_of(loader_totals).get(stage, 0.0))
    return family
