import argparse

import pytest

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.profiling.predict.all_reduce import Cluster
from datasvc.trainer.recipes.profiling.predict.cluster_options import add_cluster_options, parse_clusters
from datasvc.trainer.recipes.profiling.predict.links import Link, parse_duration


def clusters(*words):
    parser = argparse.ArgumentParser()
    add_cluster_options(parser, num_nodes=[1, 2], said="1 2")
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
