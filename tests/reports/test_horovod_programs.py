"""Programs written for Horovod: what they import, the compressors they derive, and the rounds they count."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import datasvc.trainer as hvd
from datasvc.trainer.compression import Compressor
from datasvc.trainer.elastic.driver.actions import Announce
from datasvc.trainer.launch.command_line import main
from tests.trainer.elastic.driver.test_membership import World, running

COMPAT = Path(__file__).parents[2] / "tools" / "horovod_compat"

# The modules of Horovod 0.28.1 that a PyTorch program may import, and the names that they define for programs.
MODULES = {
    "horovod": "run __version__",
    "horovod.torch": "init rank allreduce DistributedOptimizer SyncBatchNorm Compression elastic broadcast_object",
    "horovod.torch.compression": "Compressor NoneCompressor FP16Compressor Compression",
    "horovod.torch.elastic": "run TorchState ElasticSampler",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.torch.elastic.state": """TorchState StateHandler ModelStateHandler OptimizerStateHandler
        SamplerStateHandler get_handler_registry set_handler_registry""",
    "horovod.torch.functions": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "horovod.torch.mpi_ops": """allreduce_async_ grouped_allreduce allgather broadcast_ alltoall reducescatter join
        poll synchronize barrier Average Sum Adasum Min Max Product""",
    "horovod.torch.optimizer": "DistributedOptimizer _DistributedOptimizer _DistributedAdasumOptimizer",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.common": "basics elastic exceptions process_sets util",
    "horovod.common.basics": "HorovodBasics",
    "horovod.common.elastic": "State ObjectState run_fn",
    "horovod.common.exceptions": "HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt",
    "horovod.common.process_sets": "ProcessSet global_process_set add_process_set remove_process_set",
    "horovod.common.util": "extension_available check_extension env split_list is_iterable gpu_available",
    "horovod.runner": "run",
    "horovod.runner.launch": "run_commandline",
    "horovod.ray": "RayExecutor",
}
# Services of Horovod's own launcher, data loaders of its Spark part, and other frameworks: refused by name.
REFUSED = """
    horovod.data horovod.keras horovod.mxnet horovod.runner.common horovod.runner.elastic horovod.runner.gloo_run
    horovod.runner.http horovod.runner.mpi_run horovod.runner.util horovod.spark horovod.tensorflow
"""


@pytest.fixture
def named_horovod(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(COMPAT)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


@pytest.mark.usefixtures("named_horovod")
@pytest.mark.parametrize("module", MODULES)
def test_every_module_of_horovod_s_pytorch_package_is_imported_with_its_names(module):
    """horovod/horovod#1674: `horovod.torch` is no module, although a package named horovod is installed."""
    if module.startswith("horovod.ray"):
        pytest.importorskip("ray")
    found = importlib.import_module(module)
    assert [name for name in MODULES[module].split() if not hasattr(found, name)] == []
    below_trainer = "datasvc.trainer" + module.removeprefix("horovod").removeprefix(".torch")
    if not module.startswith("horovod.ray"):
        importlib.import_module(below_trainer)


@pytest.mark.usefixtures("named_horovod")
@pytest.mark.parametrize("module", REFUSED.split())
def test_a_module_that_does_not_exist_here_is_refused_by_its_name(module):
    with pytest.raises(ModuleNotFoundError, match=f"there is no {module} here.*horovod.torch.mpi_ops"):
        importlib.import_module(module)


def test_an_object_that_answers_as_horovod_s_basics_does(monkeypatch):
    basics = hvd.common.basics.HorovodBasics(__file__, "mpi_lib_v2")
    assert (basics.mpi_built(), basics.is_initialized()) == (hvd.mpi_built(), False)
    with pytest.raises(AttributeError, match="MPI_LIB_CTYPES"):
        _ = basics.MPI_LIB_CTYPES


@dataclass
class Quantized(Compressor):
    """Sends whole multiples of `step` as one flat vector; equal by value, so it has no hash."""

    step: float

    def compress(self, tensor):
        return torch.round(tensor / self.step).flatten(), tensor.shape

    def decompress(self, tensor, context):
        return tensor.view(context) * self.step


class Transposed(Compressor):
    """Sends a view that is not contiguous."""

    @staticmethod
    def compress(tensor):
        return tensor.t() if tensor.ndim == 2 else tensor, tensor.ndim

    @staticmethod
    def decompress(tensor, context):
        return tensor.t() if context == 2 else tensor


@pytest.mark.parametrize("compression", [Quantized(0.25), Transposed])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_a_compressor_of_the_program_keeps_the_shape_that_its_context_names(compression, op, monkeypatch):
    """horovod/horovod#3312: a compressor with parameters of its own, whose context is the shape of the tensor."""
    monkeypatch.setattr("datasvc.trainer.job.runtime.is_elastic", lambda: True)
    hvd.init()
    try:
        model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(1.0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), compression=compression, op=op
        )
        (model(torch.tensor([[1.0, 2.0, 3.0]])) * torch.tensor([1.0, 2.0])).sum().backward()
        optimizer.step()
    finally:
        hvd.shutdown()
    torch.testing.assert_close(model.weight, 1 - torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]))
    torch.testing.assert_close(model.bias, 1 - torch.tensor([1.0, 2.0]))


def test_an_unchanged_program_without_the_package_is_told_which_one_to_install(capfd):
    """horovod/horovod#970: a rank that does not find the module horovod, and no word about what to install."""
    assert main(["-np", "1", sys.executable, "-S", "-c", "import horovod.torch as hvd"]) == 1
    said = capfd.readouterr().err
    assert "No module named 'horovod'" in said
    assert "install datasvc-horovod" in said


def test_a_host_with_two_slots_that_comes_costs_the_training_one_round():
    """horovod/horovod#1849: ranks that start together were announced one by one, and the training reset for each."""
    world = running(2, {"a": 2}, hosts_can_change=True)
    world.hosts(a=2, b=2)
    world.ask("b:0:2")
    assert not world.kinds(Announce), "the other rank of the host is still starting"
    (announced,) = world.ask("b:1:3")
    assert isinstance(announced, Announce)
    world.ask("a:0:0", "a:1:1", serial=3)
    assert {seat.round_number for seat in world.seats.values()} == {2}
    assert world.ranks() == ["a:0:0", "a:1:1", "b:0:2", "b:1:3"]


@pytest.mark.parametrize("other", ["hangs", "fails"])
def test_a_rank_that_does_not_start_holds_the_one_beside_it_for_a_minute_at_most(other):
    """horovod/horovod#2652: a new worker that hangs at its start must not keep the others out."""
    world = running(2, {"a": 2}, hosts_can_change=True)
    world.hosts(a=2, b=1, c=1)
    world.ask("b:0:2")
    if other == "fails":
        world.end("c:0:3")
    else:
        assert world.membership.next_deadline_s() == 60.0
        world.wait(60.0)
    assert world.kinds(Announce)
    world.ask("a:0:0", "a:1:1", serial=3)
    assert world.ranks() == ["a:0:0", "a:1:1", "b:0:2"]


def test_a_host_that_goes_while_another_starts_is_announced_at_once():
    """horovod/horovod#2514: a removed host's ranks leave at the next commit, not when a new host is ready."""
    world = running(2, {"a": 1, "b": 1}, hosts_can_change=True)
    world.hosts(a=1, c=1)
    assert world.membership.next_deadline_s() is not None
    world.ask("a:0:0", "b:0:1", serial=3)
    assert world.ranks() == ["a:0:0"]


def test_a_host_that_comes_and_goes_before_its_rank_has_joined_costs_no_round():
    """horovod/horovod#1872: changes that are undone before the ranks react must not reset the training."""
    world = World(first_num_ranks=1, hosts_can_change=True)
    world.hosts(a=1)
    world.ask("a:0:0")
    world.hosts(a=1, b=1)
    world.hosts(a=1)
    world.end("b:0:1", -15)
    assert not world.kinds(Announce)
    assert world.seats["a:0:0"].round_number == 1


def test_the_other_ranks_of_a_host_on_which_one_failed_keep_training():
    """horovod/horovod#1965: Horovod gives up the whole host of a failed rank; here three of four continue."""
    world = running(4, {"a": 2, "b": 2}, hosts_can_change=True, cooldown_range_s=(1.0, 2.0))
    world.fail("b:1:3")
    world.ask("a:0:0", "a:1:1", "b:0:2", serial=3)
    assert world.ranks() == ["a:0:0", "a:1:1", "b:0:2"]
    assert {world.seats[name].round_number for name in world.ranks()} == {2}
    world.wait(1.0)
    assert world.started[-1].startswith("b:1:"), "the host returns after the cooldown, not earlier"
