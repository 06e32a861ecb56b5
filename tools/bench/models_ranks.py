"""Saves and restores of several ranks: sharded ones beside replicas, and on the nodes beside the repository."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import datasvc
from datasvc.api import DataRepository
from datasvc.models import CheckpointManager
from datasvc.models.saving.staging_buffer import plan_offsets
from datasvc.models.tensors.write import CODECS
from datasvc.repository.objects.batch import ObjectBatch
from tools.bench.ranks import say
from tools.bench.runner import Options, Report, bench, run_ranks, turns

NUM_TENSORS = 16
KINDS = ("sharded", "replicated")
SAVES = ("nodes", "repository")
RESTORES = ("repository", "own disk", "lost node")
FIGURES = {"copied": "MB", "written": "MB", "stall": "ms", "total": "ms"}

Figure = dict[str, Any]


@bench(repeats=5, ranks=2, mb=(128, "MiB of the whole state"))
def models_sharded(options: Options) -> Report:
    """A sharded save beside one of replicas: what a rank copies and stores, and how long the save stops the training.

    Several gloo ranks on one machine save the same whole tensors, once as DTensors of which each rank has a part, and
    once as replicas on every rank. A save of new values follows one of the other kind, by turns.
    """
    turn = run_ranks(save_by_turns, options.ranks, str(options.folder), options.repeats, options.mb << 20)
    found = [line["figures"] for line in turn]
    report = Report(f"saves by {options.ranks} ranks of {options.mb} MiB, codec none", "The slowest rank counts.")
    for figure, unit in FIGURES.items():
        values = [slowest(found, figure, kind) for kind in KINDS]
        for kind, each in zip(KINDS, values, strict=True):
            report.add_row(f"{kind}: {figure} by the busiest rank", unit, each)
        report.add_ratio(f"{figure}: sharded / replicated", *values)
    return report


@bench(
    repeats=5,
    ranks=(2, "each is a node"),
    mb=(128, "MiB of the state"),
    codec={"choices": CODECS, "default": "delta", "help": "of the repository; default: %(default)s"},
)
def models_local(options: Options) -> Report:
    """Versions on the disks of the nodes beside versions in the repository: stall and time of a save, of a restore.

    Several gloo ranks on one machine, each with the folder of a node of its own, save replicas of new values and
    restore them, by turns: on the nodes, with a copy of each object on the next one, and in a repository. All lie on
    one disk, so the repository is as fast as a store can be, and the nodes share what each has alone in a cluster.
    """
    settings = (str(options.folder), options.repeats, options.mb << 20, options.codec)
    found = [line["figures"] for line in run_ranks(use_nodes_by_turns, options.ranks, *settings)]
    title = f"{options.mb} MiB on the disks of {options.ranks} nodes, and in a repository with {options.codec}"
    report = Report(title, "The slowest rank counts.")
    for figure, kinds in (("stall", SAVES), ("save", SAVES), ("restore", RESTORES)):
        values = {kind: slowest(found, figure, kind) for kind in kinds}
        for kind in kinds:
            report.add_row(f"{figure}, {kind}", "ms", values[kind])
        for kind in kinds:
            if kind != "repository":
                report.add_ratio(f"{figure}: {kind} / repository", values[kind], values["repository"])
    return report


def slowest(found: Sequence[Sequence[Figure]], figure: str, kind: str) -> list[float]:
    """Return the largest value of each turn of a kind; `found` has, of each turn, the figures of all ranks."""
    return [max(own[figure] for own in turn) for turn in found if turn[0]["kind"] == kind and figure in turn[0]]


def start_rank(folder: str) -> DataRepository:
    """Join the other ranks; returns the repository, which rank 0 makes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        datasvc.open(f"{folder}/repo", create=True)
    dist.barrier()
    return datasvc.open(f"{folder}/repo")


def say_all(own: Figure) -> None:
    """Print the figures of all ranks. Every rank calls this in the same order."""
    by_rank: list[Figure] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    say(figures=by_rank)


def save_by_turns(folder: str, repeats: int, num_bytes: int) -> None:
    """Be a rank: save in each round once sharded and once as replicas."""
    repo = start_rank(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    written, real = [0], ObjectBatch.write

    def write(batch: ObjectBatch, info: datasvc.repository.ObjectInfo, content: bytes | memoryview) -> None:
        written[0] += info.size_bytes
        real(batch, info, content)

    ObjectBatch.write = write  # type: ignore[method-assign]
    managers = {kind: repo.models.manager(kind, codec="none") for kind in KINDS}
    for repeat, kind in turns(KINDS, repeats + 1):
        # Values that no version has: equal chunks would not be stored again.
        state = make_sharded(kind, mesh, num_bytes, 2 * repeat + KINDS.index(kind))
        local = {name: getattr(tensor, "to_local", lambda same=tensor: same)() for name, tensor in state.items()}
        written[0] = 0
        dist.barrier()
        began_s = time.perf_counter()
        handle = managers[kind].save(state, step=repeat)
        handle.result()
        own = {"kind": kind, "stall": 1e3 * handle.stall_s, "total": 1e3 * (time.perf_counter() - began_s)}
        if repeat:  # the first saves allocate the buffers
            say_all(own | {"copied": plan_offsets(local)[1] / 1e6, "written": written[0] / 1e6})
    for manager in managers.values():
        manager.close()
    dist.destroy_process_group()


def make_sharded(kind: str, mesh: DeviceMesh, num_bytes: int, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank holds, `float32[rows, 1024]`; equal for both kinds."""
    generator = torch.Generator().manual_seed(seed)
    rows = num_bytes // NUM_TENSORS // 4096
    whole = {f"w{number}": torch.randn(rows, 1024, generator=generator) for number in range(NUM_TENSORS)}
    if kind == "replicated":
        return whole
    return {name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for name, tensor in whole.items()}


def use_nodes_by_turns(folder: str, repeats: int, num_bytes: int, codec: str) -> None:
    """Be a rank, with a node of its own: save and restore there and in the repository, by turns."""
    repo, node = start_rank(folder), f"{folder}/node{dist.get_rank()}"
    time_saves(repo, node, repeats, num_bytes, codec)
    time_restores(repo, node, repeats, num_bytes, codec)
    dist.destroy_process_group()


def make_state(num_bytes: int, seed: int) -> dict[str, torch.Tensor]:
    """Return tensors `float32[rows, 1024]`; near those of another seed, as consecutive checkpoints are."""
    fixed, moving = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed + 1)
    shape = (num_bytes // NUM_TENSORS // 4096, 1024)
    return {
        f"w{number}": torch.randn(shape, generator=fixed) + 1e-4 * torch.randn(shape, generator=moving)
        for number in range(NUM_TENSORS)
    }


def open_manager(repo: DataRepository, node: str, codec: str) -> CheckpointManager:
    """Return the manager of a rank. It is left as after an error, so that its end commits nothing."""
    return repo.models.manager("net", codec=codec, every=1_000_000, local=node, every_local=1)


def leave(manager: CheckpointManager) -> None:
    """End the use of a manager without a commit."""
    manager.__exit__(None, RuntimeError("the end of a turn"), None)


def time_saves(repo: DataRepository, node: str, repeats: int, num_bytes: int, codec: str) -> None:
    """Say the figures of two saves for each round."""
    nodes = open_manager(repo, node, codec)
    plain = repo.models.manager("plain", codec=codec)
    for repeat, kind in turns(SAVES, repeats + 1):
        state = make_state(num_bytes, 2 * repeat + SAVES.index(kind))
        dist.barrier()
        began_s = time.perf_counter()
        # A save to the repository by the manager of the nodes would be written to both.
        handle = nodes.save(state, step=repeat, to="nodes") if kind == "nodes" else plain.save(state, step=repeat)
        handle.result()
        save_s = time.perf_counter() - began_s
        if repeat:  # the first saves allocate the buffers
            say_all({"kind": kind, "stall": 1e3 * handle.stall_s, "save": 1e3 * save_s})
    plain.close()
    nodes.save(state, step=repeats + 1, wait=True)
    leave(nodes)


def time_restores(repo: DataRepository, node: str, repeats: int, num_bytes: int, codec: str) -> None:
    """Say the figures of three restores for each round."""
    into = make_state(num_bytes, 0)
    for repeat, kind in turns(RESTORES, repeats + 1):
        if kind == "lost node" and dist.get_rank() == dist.get_world_size() - 1:
            shutil.rmtree(node)
        dist.barrier()
        manager = repo.models.manager("net") if kind == "repository" else open_manager(repo, node, codec)
        dist.barrier()
        began_s = time.perf_counter()
        found = manager.restore(into=into)
        took_s = time.perf_counter() - began_s
        assert ("on the nodes" in str(found.version)) == (kind != "repository")
        leave(manager)
        if repeat:
            say_all({"kind": kind, "restore": 1e3 * took_s})
