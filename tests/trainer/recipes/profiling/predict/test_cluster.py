import argparse

import pytest

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.profiling.predict.cluster import (
    Cluster,
    Link,
    add_cluster_options,
    parse_bandwidth,
    parse_clusters,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("10GbE", 1.25e9), ("100Gbit/s", 12.5e9), ("200 Gb/s", 25e9), ("25GB/s", 25e9), ("100Mbps", 12.5e6)],
)
def test_bandwidths_are_read_in_bits_or_bytes_as_written(text, bytes_per_s):
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize(("text", "duration_s"), [("50us", 50e-6), ("1.5 ms", 1.5e-3), ("0s", 0.0), ("3ns", 3e-9)])
def test_durations_are_read_with_their_unit(text, duration_s):
    assert parse_duration(text) == pytest.approx(duration_s)


@pytest.mark.parametrize("text", ["10", "fast", "10GbX", "-1GB/s", "0Gbit/s"])
def test_what_is_no_bandwidth_is_refused(text):
    with pytest.raises(ConfigError, match="10GbE"):
        parse_bandwidth(text)


def test_what_is_no_duration_link_or_cluster_is_refused():
    with pytest.raises(ConfigError, match="50us"):
        parse_duration("50")
    with pytest.raises(ConfigError, match=r"bandwidth of a link is 0\.0"):
        Link(0.0)
    with pytest.raises(ConfigError, match="at least 1"):
        Cluster(0, Link(1.0))


def clusters(*words):
    parser = argparse.ArgumentParser()
    add_cluster_options(parser, num_nodes=[1, 2], default_help="1 2")
    return parse_clusters(parser.parse_args(words))


def test_each_number_of_nodes_is_a_cluster_of_the_same_links():
    network = Link(1.25e9, parse_duration("50us"))
    assert clusters() == [Cluster(1, network), Cluster(2, network)]
    inside = Link(2e11, parse_duration("5us"))
    assert clusters("--nodes", "8", "--ranks-per-node", "4", "--inside-bandwidth", "200GB/s") == [
        Cluster(8, network, 4, inside)
    ]


def test_a_cluster_says_what_it_is():
    (cluster,) = clusters("--nodes", "8", "--ranks-per-node", "4", "--inside-bandwidth", "200GB/s")
    assert cluster.describe() == "nodes of 4 ranks, 1.25 GB/s and 50 us between them, 200 GB/s and 5 us inside"


def test_a_latency_inside_without_links_inside_is_refused():
    with pytest.raises(ConfigError, match="without --inside-bandwidth"):
        clusters("--inside-latency", "1us")
