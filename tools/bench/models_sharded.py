"""A sharded save beside one of replicas: what a rank copies and stores, and how long the save stops the training.

Several gloo ranks on one machine save the same whole tensors, once as DTensors of which each rank has a part, and
once as replicas on every rank. A save of new values follows one of the other kind, by turns.

    PYTHONPATH=. python -P tools/bench/models_sharded.py [--repeats 5] [--ranks 2] [--mb 128] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import datasvc
from datasvc.models.saving.staging_buffer import plan_offsets
from datasvc.repository.objects.batch import ObjectBatch
from tools.bench.report import Report, make_parser

KINDS = ("sharded", "replicated")
NUM_TENSORS = 16


def make_state(kind: str, mesh: DeviceMesh, num_bytes: int, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank holds, `float32[rows, 1024]`; equal for both kinds."""
    generator = torch.Generator().manual_seed(seed)
    rows = num_bytes // NUM_TENSORS // 4096
    whole = {f"w{number}": torch.randn(rows, 1024, generator=generator) for number in range(NUM_TENSORS)}
    if kind == "replicated":
        return whole
    return {name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for name, tensor in whole.items()}


def save_by_turns(rank: int, settings: argparse.Namespace, folder: str) -> None:
    """Save on one rank; rank 0 writes the figures of all ranks to a file in `folder`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=settings.ranks)
    mesh = init_device_mesh("cpu", (settings.ranks,))
    repo = datasvc.open(f"{folder}/repo", create=rank == 0) if rank == 0 else None
    dist.barrier()
    repo = repo or datasvc.open(f"{folder}/repo")
    written, real = [0], ObjectBatch.write

    def write(batch: ObjectBatch, info: datasvc.repository.ObjectInfo, content: bytes | memoryview) -> None:
        written[0] += info.size_bytes
        real(batch, info, content)

    ObjectBatch.write = write  # type: ignore[method-assign]
    figures = []
    managers = {kind: repo.models.manager(kind, codec="none") for kind in KINDS}
    for repeat in range(settings.repeats + 1):
        for kind in KINDS if repeat % 2 == 0 else KINDS[::-1]:
            # Values that no version has: equal chunks would not be stored again.
            state = make_state(kind, mesh, settings.mb << 20, 2 * repeat + KINDS.index(kind))
            local = {name: getattr(tensor, "to_local", lambda same=tensor: same)() for name, tensor in state.items()}
            written[0] = 0
            dist.barrier()
            began_s = time.perf_counter()
            handle = managers[kind].save(state, step=repeat)
            handle.result()
            own = {
                "kind": kind,
                "stall_s": handle.stall_s,
                "total_s": time.perf_counter() - began_s,
                "copied_mb": plan_offsets(local)[1] / 1e6,
                "written_mb": written[0] / 1e6,
            }
            by_rank: list[dict[str, object]] = [{}] * settings.ranks
            dist.all_gather_object(by_rank, own)
            if repeat:  # the first saves allocate the buffers
                figures.append(by_rank)
    for manager in managers.values():
        manager.close()
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def main() -> None:
    """Parse the command line, measure, and show the figures."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--mb", type=int, default=128, help="MiB of the whole state; default: %(default)s")
    settings = parser.parse_args()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=save_by_turns, args=(rank, settings, folder)) for rank in range(settings.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        figures = json.loads(Path(folder, "figures.json").read_text())
    report = Report(f"saves by {settings.ranks} ranks of {settings.mb} MiB, codec none", "The slowest rank counts.")
    values = {}
    for name, unit in (("copied_mb", "MB"), ("written_mb", "MB"), ("stall_s", "ms"), ("total_s", "ms")):
        factor = 1 if unit == "MB" else 1e3
        for kind in KINDS:
            values[name, kind] = [
                max(own[name] for own in by_rank) * factor for by_rank in figures if by_rank[0]["kind"] == kind
            ]
            report.add_row(f"{kind}: {name.rpartition('_')[0]} by the busiest rank", unit, values[name, kind])
        report.add_ratio(f"{name.rpartition('_')[0]}: sharded / replicated", *(values[name, kind] for kind in KINDS))
    report.show(as_json=settings.as_json)


if __name__ == "__main__":
    main()
