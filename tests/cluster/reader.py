"""A program for nodes: one rank of a job that reads a data set of `content` through the node's cache, and its peers.

It looks at every sample. At its end, or on SIGTERM, it prints what was served as a line of JSON:

    served: {"epoch": [numbers of the samples, in order]}
    wrong: numbers of those whose bytes were not theirs
    counters: of the cache, in all

Errors of datasvc end it with `EXIT_OF_OURS`.
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
import threading

from datasvc.cache import Cache
from datasvc.cache.peers.membership import parse_membership
from datasvc.cache.peers.peer_source import PeerSettings
from datasvc.cache.peers.peers import Peers
from datasvc.cache.prefetch.prefetching_store import PrefetchingShardStore
from datasvc.errors import DatasvcError
from datasvc.loaders.core.batches import Cursor, SampleBatches
from datasvc.order import OrderConfig
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from tests.cluster.content import is_right

EXIT_OF_OURS = 9
told_to_stop = threading.Event()


def read(options, cache, seen):
    """Serve epochs of one rank into `seen`."""
    split = open_dataset(Repository.open(options.repo), options.ref)["train"]
    config = OrderConfig(seed=options.seed, shuffle="windowed", lanes=2, block=10)
    shards = PrefetchingShardStore(cache, split, config)
    rank = {"batch_size": options.batch_size, "rank": options.rank, "world_size": options.world_size}
    batches = SampleBatches(split, shards, config, **rank, tail="short", blob="blob", columns=("number",))
    try:
        for batch in batches.stream(Cursor(0, 0)):
            if batch.epoch == options.epochs or told_to_stop.is_set():
                break
            numbers = batch.columns["number"].tolist()
            seen["wrong"] += [
                number for number, blob in zip(numbers, batch.blobs, strict=True) if not is_right(number, blob)
            ]
            seen["served"].setdefault(batch.epoch, []).extend(numbers)
            if options.report and (seen["wrong"] or batch.after.position == len(split)):
                report(options.report, seen["wrong"], seen["served"][batch.epoch])
            batches.retire(batch)
            if batch.after.epoch == 0 and batch.after.position == options.pause_at:
                pause(options.gate)
    finally:
        batches.close()
        shards.close()


def pause(gate):
    """Say so, and wait until somebody writes into the pipe `gate`."""
    say("paused")
    with open(gate, encoding="ascii") as opened:
        opened.read()


def say(line):
    """Tell whoever started us."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def report(path, wrong, numbers):
    """Add a line to a file: an epoch that is whole, or wrong samples as soon as they are seen."""
    with open(path, "a", encoding="ascii") as file:
        file.write(json.dumps({"wrong": wrong, "numbers": numbers}) + "\n")


def main():
    parser = argparse.ArgumentParser()
    for name in ("repo", "ref", "cache", "budget", "peers", "own", "gate", "report"):
        parser.add_argument(f"--{name}")
    for name, default in {
        "epochs": 1,
        "rank": 0,
        "world-size": 1,
        "batch-size": 4,
        "seed": 0,
        "pause-at": -1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: told_to_stop.set())
    faulthandler.register(signal.SIGUSR1)  # of `Program.wait`
    try:
        return serve(options)
    except DatasvcError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}")
        return EXIT_OF_OURS


def serve(options):
    """Serve until the end, and print what was served; returns the exit status."""
    peers = Peers(
        parse_membership(options.peers, local_url=options.own), PeerSettings(token=os.environ.get("DATASVC_TOKEN"))
    )
    seen = {"served": {}, "wrong": []}
    with Cache(options.cache, budget=options.budget, peers=peers) as cache:
        read(options, cache, seen)
        say(json.dumps({**seen, "counters": cache.counters()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
