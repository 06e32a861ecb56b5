"""Versions on the disks of the nodes beside versions in the repository: stall and time of a save, time of a restore.

Several gloo ranks on one machine, each with the folder of a node of its own, save replicas of new values and restore
them, by turns: on the nodes, with a copy of each object on the next one, and in a repository. All lie on one disk, so
the repository is as fast as a store can be, and the nodes share what each has alone in a cluster.

    PYTHONPATH=. python -P tools/bench/models_local.py [--repeats 5] [--ranks 2] [--mb 128] [--codec delta] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import datasvc
from datasvc.api import DataRepository
from datasvc.models import CheckpointManager
from datasvc.models.tensors.write import CODECS
from tools.bench.report import Report, make_parser

SAVES = ("nodes", "repository")
RESTORES = ("repository", "own disk", "lost node")
NUM_TENSORS = 16


def make_state(num_bytes: int, seed: int) -> dict[str, torch.Tensor]:
    """Return tensors `float32[rows, 1024]`; near those of another seed, as consecutive checkpoints are."""
    fixed, moving = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed + 1)
    shape = (num_bytes // NUM_TENSORS // 4096, 1024)
    return {
        f"w{number}": torch.randn(shape, generator=fixed) + 1e-4 * torch.randn(shape, generator=moving)
        for number in range(NUM_TENSORS)
    }


def open_manager(repo: DataRepository, settings: argparse.Namespace, node: str) -> CheckpointManager:
    """Return the manager of a rank. It is left as after an error, so that its end commits nothing."""
    return repo.models.manager("net", codec=settings.codec, every=1_000_000, local=node, every_local=1)


def leave(manager: CheckpointManager) -> None:
    """End the use of a manager without a commit."""
    manager.__exit__(None, RuntimeError("the end of a turn"), None)


def time_saves(repo: DataRepository, settings: argparse.Namespace, node: str) -> list[dict[str, Any]]:
    """Return the figures of this rank, two for each repeat."""
    figures = []
    nodes = open_manager(repo, settings, node)
    plain = repo.models.manager("plain", codec=settings.codec)
    for repeat in range(settings.repeats + 1):
        for kind in SAVES if repeat % 2 == 0 else SAVES[::-1]:
            state = make_state(settings.mb << 20, 2 * repeat + SAVES.index(kind))
            dist.barrier()
            began_s = time.perf_counter()
            # A save to the repository by the manager of the nodes would be written to both.
            handle = nodes.save(state, step=repeat, to="nodes") if kind == "nodes" else plain.save(state, step=repeat)
            handle.result()
            if repeat:  # the first saves allocate the buffers
                figures.append({"kind": kind, "stall": handle.stall_s, "save": time.perf_counter() - began_s})
    plain.close()
    nodes.save(state, step=settings.repeats + 1, wait=True)
    leave(nodes)
    return figures


def time_restores(repo: DataRepository, settings: argparse.Namespace, node: str, rank: int) -> list[dict[str, Any]]:
    """Return the figures of this rank, three for each repeat."""
    figures = []
    into = make_state(settings.mb << 20, 0)
    for repeat in range(settings.repeats + 1):
        for kind in RESTORES if repeat % 2 == 0 else RESTORES[::-1]:
            if kind == "lost node" and rank == settings.ranks - 1:
                shutil.rmtree(node)
            dist.barrier()
            manager = repo.models.manager("net") if kind == "repository" else open_manager(repo, settings, node)
            dist.barrier()
            began_s = time.perf_counter()
            found = manager.restore(into=into)
            took_s = time.perf_counter() - began_s
            assert ("on the nodes" in str(found.version)) == (kind != "repository")
            leave(manager)
            if repeat:
                figures.append({"kind": kind, "restore": took_s})
    return figures


def run_rank(rank: int, settings: argparse.Namespace, folder: str) -> None:
    """Save and restore on one rank; rank 0 writes the figures of all ranks to a file in `folder`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=settings.ranks)
    repo = datasvc.open(f"{folder}/repo", create=True)
    node = f"{folder}/node{rank}"
    own = time_saves(repo, settings, node) + time_restores(repo, settings, node, rank)
    by_rank: list[list[dict[str, Any]]] = [[]] * settings.ranks
    dist.all_gather_object(by_rank, own)
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(by_rank))
    dist.destroy_process_group()


def main() -> None:
    """Parse the command line, measure, and show the figures."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--ranks", type=int, default=2, help="each is a node; default: %(default)s")
    parser.add_argument("--mb", type=int, default=128, help="MiB of the state; default: %(default)s")
    parser.add_argument("--codec", choices=CODECS, default="delta", help="of the repository; default: %(default)s")
    settings = parser.parse_args()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="datasvc-bench-") as folder:
        ranks = [context.Process(target=run_rank, args=(rank, settings, folder)) for rank in range(settings.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        by_rank = json.loads(Path(folder, "figures.json").read_text())
    title = f"{settings.mb} MiB on the disks of {settings.ranks} nodes, and in a repository with {settings.codec}"
    report = Report(title, "The slowest rank counts.")
    turns = list(zip(*by_rank, strict=True))  # of each turn, the figures of all ranks

    def slowest(figure: str, kind: str) -> list[float]:
        return [max(own[figure] for own in turn) for turn in turns if turn[0]["kind"] == kind and figure in turn[0]]

    for figure, kinds in (("stall", SAVES), ("save", SAVES), ("restore", RESTORES)):
        for kind in kinds:
            report.add_row(f"{figure}, {kind}", "ms", [1e3 * seconds for seconds in slowest(figure, kind)])
        for kind in kinds:
            if kind != "repository":
                report.add_ratio(
                    f"{figure}: {kind} / repository", slowest(figure, kind), slowest(figure, "repository")
                )
    report.show(as_json=settings.as_json)


if __name__ == "__main__":
    main()
