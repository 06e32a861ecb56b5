"""Ranks that save together: forked from one process, so that torch is loaded once. Prints what each scenario saw.

python joint_saves.py FOLDER SCENARIO...
"""

import datetime as dt
import json
import os
import signal
import sys
import threading
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import datasvc
from datasvc.errors import DatasvcError, UnavailableError
from datasvc.models.dcp import DcpWriter
from datasvc.models.saving import save_policy, writer
from datasvc.repository.objects.batch import ObjectBatch
from datasvc.repository.objects.objects import Objects

RANKS = 3


def weights(step=0):
    large = {f"large.{n}": torch.arange(40_000.0) * (n + 1) + step for n in range(6)}
    return {**large, "cut": torch.arange(2_200_000.0).view(-1, 1000) + step, "small": torch.ones(5) * step}


def caught(action):
    """Return the type and text of the error that `action` raises."""
    try:
        action()
    except DatasvcError as error:
        return [type(error).__name__, str(error)]
    return None


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def share(repo, rank):
    """Three saves, the last one after a restore, each by all ranks; says what this rank wrote."""
    written, real = [], ObjectBatch.write

    def write(batch, info, content):
        written.append(info.size_bytes)
        return real(batch, info, content)

    ObjectBatch.write = write
    with repo.models.manager("m", codec="none") as model:
        assert model.restore(default=None) is None
        for step in (1, 2):
            handle = model.save(weights(step), rank_state={"rank": rank, "t": torch.full((3,), rank)}, step=step)
        versions = [str(handle.result())]
        restored = model.restore("m@1").state
        model.save({**weights(1), "cut": weights(1)["cut"] * 2}, rank_state={"rank": rank}, step=3)
    own = restored["rank_state"][rank]
    assert all(torch.equal(restored[name], value) for name, value in weights(1).items())
    return {
        "bytes": sum(written),
        "versions": [*versions, str(model.version)],
        "own": [own["rank"], own["t"].tolist()],
    }


def unlike(repo, rank):
    """A tensor that is not the same on all ranks, as the statistics of a batch normalisation are not."""
    with repo.models.manager("m") as model:
        means = [torch.full((30_000,), float(rank)) for _ in range(6)]
        model.save({**weights(1), "means": means, "epoch": rank}, step=1)
    state = repo.models.restore("m").state
    found = torch.cat(state["means"]).unique().tolist()
    return [found, state["epoch"], torch.equal(state["cut"], weights(1)["cut"])]


def refused(repo, rank):
    """One rank has what cannot be saved, then another shape, then another step: all hear the same, and go on."""
    with repo.models.manager("m", timeout_s=10.0) as model:
        bad = {"f": print} if rank == 1 else {"f": 1}
        errors = [caught(lambda: model.save(bad, step=1))]
        errors.append(caught(lambda: model.save({"w": torch.ones(3 + (rank == 2))}, step=2)))
        errors.append(caught(lambda: model.save({"w": torch.ones(3)}, step=3 + rank)))
        errors.append(caught(lambda: model.restore("m@5")))
        odd = {"top1": "high"} if rank == 1 else {}
        errors.append(caught(lambda: model.save({"w": torch.ones(3)}, step=6, metrics=odd)))
        errors.append(caught(lambda: model.save({"w": torch.ones(3)}, step=None if rank == 1 else 7)))
        model.save({"w": torch.ones(3)}, step=9, wait=True)
        if rank == 1:
            model._restore = raising(OSError("no room for this rank"))
        errors.append(caught(lambda: model.restore("m")))
        model.save({"w": torch.ones(3)}, step=10, wait=True)
    return [*errors, str(model.version)]


def fails(repo, rank):
    """The store fails on one rank, while it stores, then on rank 0, while it commits; then one is interrupted.

    A rank may come to the next save before it has heard how the last one ended.
    """
    real = ObjectBatch.write
    with repo.models.manager("m", timeout_s=10.0) as model:
        if rank == 2:
            ObjectBatch.write = raising(UnavailableError("the disk of this rank is full"))
        handle = model.save(weights(1), rank_state={"t": torch.rand(5)}, step=1)
        errors = [caught(handle.result)]
        ObjectBatch.write = real
        put = Objects.put
        if rank == 0:
            Objects.put = raising(UnavailableError("nothing can be committed"))
        hears, hear = threading.Event(), writer.share_outcome

        def hear_late(*arguments):
            try:
                return hear(*arguments)
            finally:
                hears.wait(30)

        if rank == 2:
            writer.share_outcome = hear_late
        handle = model.save(weights(2), step=2)
        if rank != 2:
            handle.wait()
        errors.append(caught(lambda: model.save(weights(3), step=3)))
        hears.set()
        Objects.put = put
        wait_for_slot = model._queue.wait_for_slot
        if rank == 1:
            model._queue.wait_for_slot = raising(KeyboardInterrupt())
        try:
            errors.append(caught(lambda: model.save(weights(3), step=3, wait=True)))
        except KeyboardInterrupt:
            errors.append(None)
        model._queue.wait_for_slot = wait_for_slot
        model.save(weights(4), step=4, wait=True)
    return [*errors, str(model.version), repo.models.restore("m").state["small"].tolist()]


def dies(repo, rank):
    """A rank is killed while the others wait for what it stores."""
    if rank == 2:
        ObjectBatch.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    model = repo.models.manager("m")
    handle = model.save(weights(1), rank_state={"t": torch.rand(40_000)}, step=1)
    errors = [caught(handle.result), caught(lambda: model.save(weights(2), step=2))]
    errors.append(caught(model.close))
    return [error and error[0] for error in errors] + [repo.models.names()]


def stops(repo, rank):
    """Only one rank gets the signal; all stop after the same step. Time says when to save: as rank 0 has it."""
    saved, step = [], 0
    save_policy.CHECK_EVERY_S = 0.01
    with repo.models.manager("m", max_stall="50%", grace="60s") as model:
        while not model.stop_signal:
            step += 1
            dist.barrier()
            if step == 40 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if model.should_save(step):
                model.save({"w": torch.ones(3) * step}, step=step)
                saved.append(step)
    return [saved, step, model.stop_signal, repo.models.describe("m").entry["step"]]


def overlaps(repo, rank):
    """One rank is still writing when the next save comes: it is refused on all."""
    with repo.models.manager("m", overlap="refuse") as model:
        model.save(weights(1), step=1)
        if rank != 1:
            model.wait()
        error = caught(lambda: model.save(weights(2), step=2))
        model.wait()
        model.save(weights(3), step=3)
    return [error, str(model.version)]


def in_groups(repo, rank):
    """Two jobs of a world save to one name at once; the third rank is in neither."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    job = 0 if rank == 0 else 1
    with repo.models.manager("m", group=groups[job]) as model:
        for step in range(1, 4):
            model.save({"w": torch.full((20_000,), float(step)), "job": job}, step=step)
    return str(model.version)


def apart(repo, rank):
    """Rank 2 has a folder of its own under the path of the others, as a node whose disk is not shared."""
    url = f"{repo.repository.url}.of-node-{rank // 2}"
    own = datasvc.open(url, create=True)
    errors = [caught(lambda: own.models.manager("m"))]
    try:
        dcp.save(
            {"w": DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (RANKS,)))}, storage_writer=DcpWriter(url)
        )
    except CheckpointException as error:
        errors.append([str(each) for each, _ in error.failures.values()])
    return [*errors, own.models.names()]


def run_rank(folder, scenario, rank):
    torch.set_num_threads(1)
    path = f"{folder}/{scenario}"
    store = dist.FileStore(f"{path}.store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=dt.timedelta(seconds=30))
    seen = globals()[scenario](datasvc.open(f"{path}.repo"), rank)
    with open(f"{path}.{rank}", "w") as file:
        json.dump(seen, file)


def main():
    folder, *scenarios = sys.argv[1:]
    for scenario in scenarios:
        datasvc.open(f"{folder}/{scenario}.repo", create=True)
        pids = []
        for rank in range(RANKS):
            pids.append(os.fork())
            if not pids[-1]:
                try:
                    run_rank(folder, scenario, rank)
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
                os._exit(0)
        for pid in pids:
            os.waitpid(pid, 0)
        seen = []
        for rank in range(RANKS):
            try:
                with open(f"{folder}/{scenario}.{rank}") as file:
                    seen.append(json.load(file))
            except FileNotFoundError:
                seen.append(None)
        sys.stdout.write(json.dumps([scenario, seen]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
