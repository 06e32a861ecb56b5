"""Four ranks save sharded states in the background; any number restores, at other layouts. Takes a URL."""

import os
import signal
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from checking import raises, run_checks
from forked_ranks import run_ranks
from safetensors.torch import load_file
from sharded_states import VALUES, assert_whole, distributed, whole_of, whole_tensors
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import datasvc
from datasvc.errors import ConfigError, UnavailableError
from datasvc.models.interop import exporting
from datasvc.models.restoring.restore import read_version
from datasvc.models.saving.staging_buffer import HostBuffer
from datasvc.repository.objects.batch import ObjectBatch

(URL,) = sys.argv[1:]
WHOLE = whole_tensors()
LAYOUTS = (("line", "rows"), ("line", "columns"), ("square", "both"), ("square", "mixed"), ("line", "replicas"))
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@cache
def mesh(shape):
    if shape == "line":
        return init_device_mesh("cpu", (dist.get_world_size(),))
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def zeros():
    return {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}


def repo():
    return datasvc.open(URL)


def total(number):
    """Sum of a number over the ranks."""
    summed = torch.tensor(number)
    dist.all_reduce(summed)
    return int(summed)


class CountedWrites:
    """Counts the bytes of objects that this rank writes."""

    def __init__(self):
        self.num_bytes, real = 0, ObjectBatch.write

        def write(batch, info, content):
            self.num_bytes += info.size_bytes
            return real(batch, info, content)

        self.patch = mock.patch.object(ObjectBatch, "write", write)


def check_every_layout_is_restored_in_every_other():
    plain = repo().models
    with plain.manager("layouts", every=1) as model:
        for step, (shape, layout) in enumerate(LAYOUTS, 1):
            assert model.should_save(step)
            state = {"model": distributed(WHOLE, mesh(shape), layout), "values": VALUES}
            handle = model.save(state, rank_state={"rank": dist.get_rank()}, step=step)
            for tensor in state["model"].values():
                tensor.to_local().zero_()  # the training goes on
            assert str(handle.result()) == f"layouts@{step}"
        for number, (shape, layout) in enumerate([*LAYOUTS[1:], LAYOUTS[0]], 1):
            into = {"model": distributed(zeros(), mesh(shape), layout), "values": None, "rank_state": None}
            found = model.restore(f"layouts@{number}", into=into).state
            assert_whole(into["model"], WHOLE)
            assert found["model"]["even"] is into["model"]["even"]
            assert found["values"] == VALUES
            assert [own["rank"] for own in found["rank_state"]] == [0, 1, 2, 3]
    records = {record.name: record for record in read_version(repo().repository, "layouts@1").records}
    assert records.keys() == {f"model.{name}" for name in WHOLE}, "one tensor per name"
    whole = read_version(repo().repository, "layouts@5").records
    assert [(record.name, record.dtype, record.shape) for record in whole] == [
        (record.name, record.dtype, record.shape) for record in records.values()
    ]
    if dist.get_rank() == 0:
        saved = plain.save("whole", {"model": WHOLE, "values": VALUES}, step=1)
        same = [record.content for record in read_version(repo().repository, saved).records]
        assert same == [record.content for record in whole], "replicas are stored in the chunks of one process"
        assert not plain.diff("layouts@1", "layouts@4").tensors.changed, "other chunks, but no tensor differs"
    dist.barrier()
    into = {"model": distributed(zeros(), mesh("square"), "both")}
    plain.restore("whole", into=into)
    assert_whole(into["model"], WHOLE)


def check_a_rank_copies_stores_and_reads_its_own_part_alone():
    large = {"large": torch.arange(4.0 * 300_000).view(-1, 300)}
    part_bytes = large["large"].nbytes // 4
    counted, copied = CountedWrites(), []
    real = HostBuffer.copy

    def copy(buffer, tensors):
        copies = real(buffer, tensors)
        copied.append(copies.nbytes)
        return copies

    with (
        counted.patch,
        mock.patch.object(HostBuffer, "copy", copy),
        repo().models.manager("parts", codec="none") as model,
    ):
        for layout in ("rows", "replicas"):
            model.save(distributed(large, mesh("line"), layout), step=1, wait=True)
            assert layout == "replicas" or counted.num_bytes == part_bytes, counted.num_bytes
            assert total(counted.num_bytes) == 4 * part_bytes, "nothing twice"
            counted.num_bytes = 0
            large["large"] += 1
        assert copied == [part_bytes, 4 * part_bytes], copied
        into = distributed({"large": torch.zeros_like(large["large"])}, mesh("line"), "rows")
        report = model.restore("parts@1", into=into).report
    assert_whole(into, {"large": large["large"] - 2})
    assert report.size_bytes == part_bytes, report


def check_the_next_version_is_stored_as_differences():
    generator = torch.Generator().manual_seed(1)
    weights = {"w": torch.randn(4096, 128, generator=generator), "b": torch.randn(10, generator=generator)}
    with repo().models.manager("steps", codec="delta") as model:
        for step in range(1, 4):
            model.save(distributed(weights, mesh("square"), "both"), step=step, wait=True)
            if step == 1:
                weights = {name: tensor * (1 + 1e-6) for name, tensor in weights.items()}
    repository = repo().repository
    links = {
        number: [
            len(chunk.chain)
            for record in read_version(repository, f"steps@{number}").records
            for chunk in record.chunks
        ]
        for number in (1, 2)
    }
    assert set(links[1]) == {1}
    assert max(links[2]) == 2, links
    entries = [version.entry for version in repo().models.log("steps")]
    assert entries[1]["stored_bytes"] < entries[0]["stored_bytes"] / 2, entries
    assert entries[2]["stored_bytes"] == 0, "equal tensors are not stored again"
    assert [entry["parent"] for entry in entries] == [None, "steps@1", "steps@2"]
    into = distributed({name: torch.zeros_like(tensor) for name, tensor in weights.items()}, mesh("line"), "rows")
    repo().models.restore("steps", into=into)
    assert_whole(into, weights)


class Net(torch.nn.Module):
    """Weights of sizes that four ranks cannot share evenly, tied ones, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, 6)
        self.up, self.down = torch.nn.Linear(6, 12), torch.nn.Linear(12, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        self.seen += 1
        return self.head(self.down(self.up(self.embed(tokens)).relu()))


def wholes(value):
    if isinstance(value, torch.Tensor):
        return whole_of(value).detach().clone()
    return {key: wholes(each) for key, each in value.items()} if isinstance(value, dict) else value


def assert_same(found, expected, path=""):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (path, found.keys() ^ expected.keys())
        for key, value in expected.items():
            assert_same(found[key], value, f"{path}.{key}")
    else:
        same = torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected
        assert same, (path, found, expected)


def data_parallel(net):
    return net


def sharded(net):
    for layer in (net.up, net.down):
        fully_shard(layer, mesh=mesh("line"))
    return fully_shard(net, mesh=mesh("line"))


def hybrid(net):
    return fully_shard(net, mesh=mesh("square"))


def tensor_and_shard(net):
    parallelize_module(net, mesh("square")["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(net, mesh=mesh("square")["data"])


def learner(parallelize, *, tied=True):
    net = Net()
    if not tied:
        net.head.weight = torch.nn.Parameter(net.head.weight.detach().clone())
    net = parallelize(net.to(torch.float32))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def state_of(net, optimizer, options=None):
    return dict(zip(("model", "optimizer"), get_state_dict(net, optimizer, options=options), strict=True))


def check_a_model_and_its_optimizer_continue_at_any_layout():
    ways = (sharded, hybrid, tensor_and_shard, data_parallel)
    for way in ways:
        net, optimizer = learner(way)
        for step in range(2):
            torch.manual_seed(step)
            net(torch.randint(11, (4, 3))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = state_of(net, optimizer)
        expected = wholes(state)
        with repo().models.manager(way.__name__) as model:
            model.save({**state, "step": 2}, step=2, wait=True)
            if way is sharded:
                records = {record.name: record for record in read_version(repo().repository, "sharded").records}
                assert records["model.embed.weight"].content == records["model.head.weight"].content
                assert records["optimizer.state.up.weight.step"].shape == ()
            for other in ways:
                fresh, moments = learner(other)
                into = {**state_of(fresh, moments), "step": None}
                found = model.restore(into=into).state
                assert found["step"] == 2
                set_state_dict(fresh, moments, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
                assert_same(wholes(state_of(fresh, moments)), expected)


def check_other_dtypes_and_tied_tensors_that_are_stored_untied():
    state = distributed({"half": torch.randn(7, 3).bfloat16()}, mesh("line"), "rows")
    with repo().models.manager("halves") as model:
        model.save(state, step=1, wait=True)
        into = distributed({"half": torch.zeros(7, 3)}, mesh("line"), "columns")
        with raises(ConfigError, "float32 [7, 3]", "bfloat16 [7, 3]"):
            model.restore(into=into)
        into = distributed({"half": torch.zeros(7, 3).bfloat16(), "more": torch.ones(4)}, mesh("line"), "columns")
        with raises(ConfigError, "rank 0", "nothing was restored", "more"):
            model.restore(into=into)
        one = distributed({"a": torch.ones(8, 2)}, mesh("line"), "rows")["a"]
        model.save({"a": one, "b": one}, step=2, wait=True)
        two = distributed({"b": torch.ones(8, 2) * 2}, mesh("line"), "rows")["b"]
        model.save({"a": one, "b": two}, step=3, wait=True)
        model.restore("halves@2", into={"a": one, "b": one})
        with raises(ConfigError, "share memory"):
            model.restore("halves@3", into={"a": one, "b": one})


def check_stages_of_a_pipeline_hold_different_keys():
    stage = dist.get_rank() // 2
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = DeviceMesh.from_group(pairs[stage], "cpu")
    whole = {
        f"layer{number}": torch.randn(6, 4, generator=torch.Generator().manual_seed(number)) for number in range(4)
    }
    mine = {name: whole[name] for name in list(whole)[2 * stage : 2 * stage + 2]}
    state = {
        "model": distributed(mine, own, "rows"),
        "moments": {f"state.{name}.step": torch.tensor(3.0) for name in mine},
        "plain": {f"bias{stage}": torch.full((3,), float(stage))},
        "step": 3,
    }
    with repo().models.manager("stages") as model:
        model.save(state, step=3, wait=True)
        model.save(state, step=4, wait=True)
        # At the other stage: what one stage has saved, another restores.
        other = {name: torch.zeros(6, 4) for name in list(whole)[2 - 2 * stage : 4 - 2 * stage]}
        into = {"model": distributed(other, own, "columns"), "step": None}
        assert model.restore("stages@1", into=into).state["step"] == 3
        assert_whole(into["model"], {name: whole[name] for name in other})
    found = repo().models.restore("stages@2").state
    assert_same(found["model"], whole)
    assert found["moments"].keys() == {f"state.{name}.step" for name in whole}
    assert found["plain"]["bias1"].tolist() == [1.0] * 3


def check_every_rank_exports_files_of_its_own():
    weights = {f"layer{number}": torch.full((64, 32), float(number)) for number in range(8)}
    models = repo().models
    with models.manager("exported") as model:
        model.save({"model": distributed(weights, mesh("line"), "rows")}, step=1, wait=True)
    folder = Path(f"{URL}-export")
    read, load = [], exporting.load_tensors

    def counted(source, records, **options):
        read.extend(record.name for record in records)
        return load(source, records, **options)

    with mock.patch.object(exporting, "load_tensors", counted):
        done = models.export_distributed("exported", folder)
        assert len(read) == 2, read
        full = mock.patch.object(exporting, "load_tensors", side_effect=UnavailableError("the disk is full"))
        with full if dist.get_rank() == 1 else nullcontext(), raises(UnavailableError, "rank 1: the disk is full"):
            models.export_distributed("exported", f"{folder}-failed")
    assert total(len(read)) >= 8, "each tensor is read by one rank"
    dist.barrier()
    assert not Path(f"{folder}-failed").exists()
    assert [path.name for path in done.files] == sorted(path.name for path in folder.iterdir())
    assert len(done.files) == 5, "a file of each rank, and the index"
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert_same(found, weights)
    if dist.get_rank() == 0:
        models.import_(folder, "imported")
        assert not models.diff("exported", "imported").tensors.changed
        models.export("exported", f"{folder}-alone", "safetensors")
        assert_same(
            load_file(f"{folder}-alone/tensors.safetensors"), {f"model.{name}": w for name, w in weights.items()}
        )
        assert models.verify(["exported"])
    dist.barrier()


def check_a_signal_on_one_rank_ends_all_ranks_with_a_last_sharded_save():
    state = {"model": distributed(WHOLE, mesh("square"), "both")}
    with repo().models.manager("preempted", every=1000, max_stall="50%", grace="60s") as model:
        steps, should_save = 0, False
        while model.stop_signal is None:
            steps += 1
            if steps == 3 and dist.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            should_save = model.should_save(steps)
        assert should_save
        model.save(state, step=steps, wait=True)
    assert model.stop_signal == signal.SIGTERM
    (version,) = repo().models.log("preempted")
    assert version.entry["step"] == steps, "all ranks ended after the same step"
    into = {"model": distributed(zeros(), mesh("line"), "rows")}
    repo().models.restore("preempted", into=into)
    assert_whole(into["model"], WHOLE)


def check_the_ranks_agree_when_saves_become_too_expensive():
    """Each rank measures other times, and rank 0 decides for all of them."""
    state = {"model": distributed(WHOLE, mesh("square"), "both")}
    saved = []
    with repo().models.manager("limited", every=1, max_stall=0.01) as model:
        for step in range(1, 40):
            if model.should_save(step):
                saved.append(step)
                model.save(state, step=step, wait=True)
    assert 1 <= len(saved) < 39, saved
    assert [version.entry["step"] for version in repo().models.log("limited")] == saved


def check_what_cannot_be_saved_is_an_error_on_every_rank():
    with repo().models.manager("errors") as model:
        partial = DTensor.from_local(torch.ones(3), mesh("line"), [Partial()])
        with raises(ConfigError, "'w' has the placements", "redistribute"):
            model.save({"w": partial}, step=1)
        rows = distributed({"w": torch.ones(8, 2)}, mesh("line"), "rows")["w"]
        with raises(ConfigError, "other tensors", "'w float32[8, 2]'"):
            model.save({"w": rows if dist.get_rank() else torch.ones(4)}, step=1)
        with raises(ConfigError, "tensor 'w' of shape [8, 2] exactly once"):
            model.save({"w": rows if dist.get_rank() else torch.ones(8, 2)}, step=1)
        with raises(ConfigError, "is a DTensor"):
            model.save({}, rank_state={"w": rows}, step=1)
        full = UnavailableError("the disk of rank 2 is full")
        with (
            raises(UnavailableError, "rank 2: the disk of rank 2 is full"),
            mock.patch.object(ObjectBatch, "write", side_effect=full if dist.get_rank() == 2 else None),
        ):
            model.save({"w": distributed({"w": torch.rand(400, 200)}, mesh("line"), "rows")["w"]}, step=1, wait=True)
        dist.barrier()
        assert not repo().models.log("errors") if "errors" in repo().models.names() else True
        model.save({"w": rows}, step=2, wait=True)
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with (
            repo().models.manager("errors", group=pair) as model,
            raises(ConfigError, "save with all ranks of its mesh"),
        ):
            model.save({"w": rows}, step=1)
    dist.barrier()


def restore_anywhere():
    for shape, layout in (("line", "rows"), ("line", "columns"), ("line", "replicas")):
        for number in (1, 3):
            into = {"model": distributed(zeros(), mesh(shape), layout)}
            repo().models.restore(f"layouts@{number}", into=into)
            assert_whole(into["model"], WHOLE)


datasvc.open(URL, create=True)
run_ranks(4, lambda: run_checks(globals()))
for num_ranks in (1, 2, 3):
    run_ranks(num_ranks, restore_anywhere)
