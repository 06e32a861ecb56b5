"""Four ranks save through torch.distributed.checkpoint; any number restores, in other parallelisms. Takes a URL."""

import os
import signal
import sys
from contextlib import nullcontext
from functools import cache
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checking import run_checks
from forked_ranks import run_ranks
from sharded_states import VALUES, assert_whole, distributed, whole_of, whole_tensors
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from datasvc.errors import ConfigError, UnavailableError
from datasvc.models.dcp import DcpReader, DcpWriter
from datasvc.models.restoring.copies import StoredCopies
from datasvc.repository import Repository
from datasvc.repository.logs.log import MAX_ENTRY_BYTES

(URL,) = sys.argv[1:]
WHOLE = whole_tensors()


@cache
def line():
    return init_device_mesh("cpu", (dist.get_world_size(),))


@cache
def square():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


class CountingSource:
    is_near = False  # so that all is read by `read_range`

    def __init__(self):
        self.objects = Repository.open(URL).objects
        self.num_bytes = 0
        self.came_bytes = {}

    def read_range(self, digest, offset, length):
        self.num_bytes += length
        return self.objects.read_range(digest, offset, length)

    def __getattr__(self, name):
        return getattr(self.objects, name)


def zeros():
    return {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}


def versions(name):
    dist.barrier()
    numbers = Repository.open(URL).versions("models", name).numbers()
    dist.barrier()
    return numbers


def check_every_layout_is_restored_in_every_other():
    held = [(line, "rows"), (line, "columns"), (square, "both"), (square, "mixed"), (line, "replicas")]
    for number, (mesh, layout) in enumerate(held, 1):
        state = {"model": distributed(WHOLE, mesh(), layout), "values": VALUES}
        metadata = dcp.save(state, storage_writer=DcpWriter(URL, name="layouts", step=number))
        assert metadata.storage_meta.reference == f"{URL}#layouts@{number}", "every rank is told the version"
    for number, (mesh, layout) in enumerate([*held[1:], held[0]], 1):
        found = {"model": distributed(zeros(), mesh(), layout), "values": None}
        found["values"] = dict.fromkeys(VALUES)
        found["values"]["schedule"] = dict.fromkeys(VALUES["schedule"])
        dcp.load(found, storage_reader=DcpReader(URL, ref=f"layouts@{number}"))
        assert_whole(found["model"], WHOLE)
        assert found["values"] == VALUES


def check_a_rank_reads_its_own_part_alone():
    large = {"large": WHOLE["large"]}
    writer = DcpWriter(URL, name="parts", codec="none")
    dcp.save(distributed(large, line(), "rows"), storage_writer=writer)
    source = CountingSource()
    found = distributed({"large": torch.zeros_like(large["large"])}, line(), "rows")
    with mock.patch.object(StoredCopies, "open_source", return_value=nullcontext(source)):
        dcp.load(found, storage_reader=DcpReader(URL, name="parts"))
    assert_whole(found, large)
    assert source.num_bytes == large["large"].nbytes // 4, source.num_bytes


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(10, 13), torch.nn.ReLU(), torch.nn.Linear(13, 3))


def trained(mesh):
    net = model()
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        net(torch.randn(4, 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def wholes(value):
    if isinstance(value, torch.Tensor):
        return whole_of(value).detach().clone()
    return {key: wholes(each) for key, each in value.items()} if isinstance(value, dict) else value


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same(found[key], value)
        else:
            same = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
            assert same, (key, found[key], value)


def check_a_model_under_fsdp_and_its_optimizer_are_restored_under_other_parallelisms():
    net, optimizer = trained(line())
    weights, moments = get_state_dict(net, optimizer)
    expected = wholes({"model": weights, "optimizer": moments})
    dcp.save({"model": weights, "optimizer": moments}, storage_writer=DcpWriter(URL, name="fsdp", step=2))
    both = model()
    parallelize_module(both, square()["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(both, mesh=square()["data"])
    hybrid = model()
    fully_shard(hybrid, mesh=square())
    for other in (both, hybrid, model()):
        fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
        state = dict(zip(("model", "optimizer"), get_state_dict(other, fresh), strict=True))
        dcp.load(state, storage_reader=DcpReader(URL, name="fsdp"))
        set_state_dict(other, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found = dict(zip(("model", "optimizer"), get_state_dict(other, fresh), strict=True))
        assert_same(wholes(found), expected)
        # And back: what it holds now is saved as this parallelism has it.
        dcp.save(found, storage_writer=DcpWriter(URL, name="fsdp", step=3))


def check_an_asynchronous_save_has_a_group_of_its_own():
    group = dist.new_group(backend="gloo")
    state = distributed(WHOLE, line(), "rows")
    future = dcp.async_save(state, storage_writer=DcpWriter(URL, name="later"), process_group=group)
    for tensor in state.values():
        tensor.to_local().zero_()
    # Collectives of the training go on meanwhile.
    for _ in range(20):
        dist.all_reduce(torch.ones(3))
    future.result()
    found = distributed(zeros(), square(), "both")
    dcp.load(found, storage_reader=DcpReader(URL, name="later"))
    assert_whole(found, WHOLE)


class FailsOnOneRank(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if dist.get_rank() == 2:
            raise UnavailableError("the disk of rank 2 is full")
        return super().resolve_data(write_item)


def check_one_ranks_failure_is_an_error_on_every_rank_and_nothing_is_visible():
    before = versions("layouts")
    too_long = DcpWriter(URL, name="layouts", config={"notes": "x" * MAX_ENTRY_BYTES})
    for writer, planner, rank, kind in (
        (DcpWriter(URL, name="layouts"), FailsOnOneRank(), 2, UnavailableError),
        (too_long, None, 0, ConfigError),  # seen when the coordinator commits
    ):
        caught = None
        try:
            dcp.save(distributed(WHOLE, line(), "rows"), storage_writer=writer, planner=planner)
        except CheckpointException as error:
            caught = error
        assert caught is not None
        assert list(caught.failures) == [rank]
        assert isinstance(caught.failures[rank][0], kind)
        assert versions("layouts") == before


def check_jobs_that_save_to_one_name_at_once_both_land():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    state = distributed({"w": torch.full((6, 2), float(mine))}, DeviceMesh.from_group(pairs[mine], "cpu"), "rows")
    for _ in range(2):
        dcp.save(state, storage_writer=DcpWriter(URL, name="race"), process_group=pairs[mine])
    assert versions("race") == [1, 2, 3, 4]
    sums = []
    for number in (1, 2, 3, 4):
        found = {"w": torch.empty(6, 2)}
        dcp.load(found, storage_reader=DcpReader(URL, ref=f"race@{number}"))
        sums.append(found["w"].sum().item())
    assert sorted(sums) == [0, 0, 12, 12]


def check_parts_that_would_not_be_joined_are_refused():
    caught = None
    try:
        dcp.save({"w": torch.ones(2)}, storage_writer=DcpWriter(URL, name="apart"), use_collectives=False)
    except Exception as error:
        caught = error
    assert "would create a separate version for each rank" in str(caught), caught


def check_a_sharded_tensor_that_planners_do_not_see_is_refused_by_name():
    hidden = {"pair": (distributed({"w": torch.ones(4)}, line(), "rows")["w"], 1)}
    caught = None
    try:
        dcp.save(hidden, storage_writer=DcpWriter(URL, name="hidden"))
    except CheckpointException as error:
        caught = error
    assert "'pair.0' is a sharded tensor inside a tuple" in str(caught), caught


class DiesOnOneRank(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def lose_a_rank():
    caught = None
    try:
        dcp.save(
            distributed(WHOLE, line(), "rows"), storage_writer=DcpWriter(URL, name="lost"), planner=DiesOnOneRank()
        )
    except BaseException as error:
        caught = error
    os._exit(0 if caught is not None else 1)


def restore():
    for layout in ("rows", "columns", "replicas"):
        for number in (1, 3):
            found = {"model": distributed(zeros(), line(), layout)}
            dcp.load(found, storage_reader=DcpReader(URL, ref=f"layouts@{number}"))
            assert_whole(found["model"], WHOLE)


run_ranks(4, lambda: run_checks(globals()))
for num_ranks in (1, 2, 3, 8):
    run_ranks(num_ranks, restore)
run_ranks(2, lose_a_rank, failing=[1])
assert not Repository.open(URL).versions("models", "lost").numbers()
