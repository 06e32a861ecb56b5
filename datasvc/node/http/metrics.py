"""Prometheus metrics for `/metrics`: the numbers of the status document.

The metrics have a separate registry, because other libraries in this process may register theirs in the default one.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

# Each row: name in the status document, name of the metric, help text. The counters of the cache include all
# processes of the node.
_CACHE_COUNTERS: Final = (
    ("hits", "cache_hits", "Objects that were resident when requested"),
    ("misses", "cache_misses", "Objects that had to be fetched"),
    ("origin_bytes", "cache_origin_bytes", "Bytes fetched from origins"),
    ("peer_bytes", "cache_peer_bytes", "Bytes fetched from peers"),
    ("served_bytes", "cache_served_bytes", "Bytes served to peers by all servers of this cache"),
    ("corrupt", "cache_corrupt_objects", "Objects found damaged; they are never served"),
    ("evicted", "cache_evicted_objects", "Objects evicted"),
    ("evicted_bytes", "cache_evicted_bytes", "Bytes evicted"),
    ("refused", "cache_refused", "Objects that did not fit beside pinned and used ones"),
)
_SENT_COUNTERS: Final = (
    ("size_bytes", "sent_bytes", "Bytes sent to peers by this process"),
    ("num_objects", "sent_objects", "Complete responses sent to peers by this process"),
    ("num_broken", "sent_broken", "Responses to peers that were cut short"),
    ("num_refused_connections", "refused_connections", "Connections refused because of the limit"),
)
_SERVING_GAUGES: Final = (
    ("num_streams", "streams", "Responses to peers in progress"),
    ("num_connections", "connections", "Open connections"),
    ("num_fetches", "peer_fetches", "Objects being fetched for peers"),
)
_DECODING_COUNTERS: Final = (("num_images", "decoded_images", "Images decoded for loaders of other machines"),)
_PEER_COUNTERS: Final = (
    ("num_ok", "ok", "Objects received from a peer that were correct"),
    ("num_missing", "missing", "Objects that a peer did not have"),
    ("num_failed", "failed", "Requests that a peer refused, or did not complete in time"),
    ("num_lying", "lying", "Objects received from a peer that were wrong"),
    ("bytes_received", "received_bytes", "Bytes received from a peer"),
)


def render_metrics(status: Mapping[str, Any]) -> bytes:
    """Return the status document of a node in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatusCollector(status))
    return generate_latest(registry)


class _StatusCollector(Collector):
    """The metrics of one status document."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        status = self._status
        build = GaugeMetricFamily(
            "datasvc_build_info", "1; the labels are the versions of the node", labels=["version", "python"]
        )
        build.add_metric([status["version"], platform.python_version()], 1)
        yield build
        yield _gauge("up_seconds", "Seconds since this process started", status["up_s"])
        yield from _counters(status["cache"]["counters"], _CACHE_COUNTERS)
        yield from _counters(status["serving"], _SENT_COUNTERS)
        for name, metric, text in _SERVING_GAUGES:
            yield _gauge(metric, text, status["serving"].get(name, 0))
        yield from _space(status["cache"])
        yield from _peers(status["peers"])
        yield _job_states(status["jobs"])
        if "decoding" in status:
            yield from _counters(status["decoding"], _DECODING_COUNTERS)


def _counters(values: Mapping[str, Any], rows: tuple[tuple[str, str, str], ...]) -> Iterator[Metric]:
    for name, metric, text in rows:
        yield CounterMetricFamily(f"datasvc_{metric}", text, value=values.get(name, 0))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"datasvc_{name}", text, value=value)


def _space(cache: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the sizes and counts in the status of the cache."""
    for name, value in cache.items():
        if isinstance(value, int) and (name.endswith("_bytes") or name.startswith("num_")):
            yield _gauge(f"cache_{name}", f"Current value of the cache: {name}", value)
    yield _gauge("cache_jobs", "Processes that have the cache open", len(cache["jobs"]))
    used = GaugeMetricFamily("datasvc_tenant_used_bytes", "Bytes of the cache in use by a tenant", labels=["tenant"])
    for tenant, usage in cache["tenants"].items():
        used.add_metric([tenant], usage["used_bytes"])
    yield used


def _peers(peers: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    for name, metric, text in _PEER_COUNTERS:
        family = CounterMetricFamily(f"datasvc_peer_{metric}", text, labels=["peer"])
        for url, values in peers.items():
            family.add_metric([url], values.get(name, 0))
        yield family


def _job_states(jobs: list[Mapping[str, Any]]) -> Metric:
    family = GaugeMetricFamily(
        "datasvc_stage_jobs", "Staging jobs in the list of the node, by state", labels=["state"]
    )
    for state in ("waiting", "running", "done", "failed", "cancelled"):
        family.add_metric([state], sum(job["state"] == state for job in jobs))
    return family
