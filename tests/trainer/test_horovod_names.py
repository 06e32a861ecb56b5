"""Programs find what they import from Horovod's modules: the names of 0.28.1, in the modules that have them there."""

import importlib
import os
import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch

import datasvc.trainer as hvd

OPERATIONS = """
    Adasum Average HorovodInternalError Max Min ProcessSet Product Sum add_process_set allgather
    allgather_async allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier
    broadcast broadcast_ broadcast_async broadcast_async_ ccl_built cross_rank cross_size cuda_built ddl_built
    global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
    grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
    grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built mpi_enabled
    mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built
    shutdown size sparse_allreduce_async start_timeline stop_timeline synchronize
"""
STATE = "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters"
NAMES = {
    "datasvc.trainer": f"""{OPERATIONS} {STATE} Compression DistributedOptimizer SyncBatchNorm elastic mpi_ops
        functions optimizer compression sync_batch_norm common runner run __version__""",
    "datasvc.trainer.mpi_ops": f"""{OPERATIONS} Compression is_homogeneous handle_average_backwards_compatibility
        gpu_available num_rank_is_power_2""",
    "datasvc.trainer.functions": STATE,
    "datasvc.trainer.optimizer": "DistributedOptimizer _DistributedOptimizer _DistributedAdasumOptimizer",
    "datasvc.trainer.compression": "Compressor NoneCompressor FP16Compressor Compression",
    "datasvc.trainer.sync_batch_norm": "SyncBatchNorm",
    "datasvc.trainer.elastic": "ElasticSampler TorchState run sampler state",
    "datasvc.trainer.elastic.sampler": "ElasticSampler",
    "datasvc.trainer.elastic.state": """ElasticSampler ModelStateHandler ObjectState OptimizerStateHandler
        SamplerStateHandler StateHandler TorchState get_handler_registry set_handler_registry""",
    "datasvc.trainer.common.exceptions": "HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt",
    "datasvc.trainer.common.basics": "HorovodBasics",
    "datasvc.trainer.common.elastic": """State ObjectState run_fn HorovodInternalError
        HostsUpdatedInterrupt HostUpdateResult""",
    "datasvc.trainer.common.process_sets": "ProcessSet add_process_set global_process_set remove_process_set",
    "datasvc.trainer.common.util": """EXTENSIONS ccl_built check_extension ddl_built env extension_available
        gloo_built get_average_backwards_compatibility_fun gpu_available is_iterable is_version_greater_equal_than
        mpi_built nccl_built num_rank_is_power_2 split_list""",
    "datasvc.trainer.runner": "run",
    "datasvc.trainer.runner.launch": "run_commandline",
}


@pytest.mark.parametrize("module", NAMES)
def test_horovod_s_names_are_where_programs_import_them_from(module):
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


@pytest.mark.slow
def test_each_common_module_is_an_attribute_without_an_import():
    program = """
import os, sys
import torch, datasvc.trainer as hvd
for name in sys.argv[1:]:
    if (child := os.fork()) == 0:  # what another name has imported is not there
        assert getattr(hvd.common, name).__name__ == f"datasvc.trainer.common.{name}"
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
    words = [sys.executable, "-c", program, "basics", "elastic", "exceptions", "process_sets", "util"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_modules_are_attributes_without_an_import_and_their_exceptions_load_no_torch():
    program = """
import sys
import datasvc.trainer.common.exceptions, datasvc.trainer.runner
assert "torch" not in sys.modules
import datasvc.trainer as hvd
assert hvd.elastic.sampler.ElasticSampler is hvd.elastic.ElasticSampler
assert hvd.elastic.state.TorchState is hvd.elastic.TorchState
assert hvd.mpi_ops.Sum is hvd.Sum and hvd.functions.broadcast_object is hvd.broadcast_object
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_module_of_the_operations_has_no_name_that_horovod_has_elsewhere():
    names = {}
    exec("from datasvc.trainer.mpi_ops import *", names)
    assert names["allreduce"] is hvd.allreduce
    assert not {*STATE.split(), "DistributedOptimizer", "SyncBatchNorm", "run"} & {*names, *dir(hvd.mpi_ops)}
    with pytest.raises(AttributeError, match=r"'datasvc\.trainer\.mpi_ops' has no attribute 'run'"):
        _ = hvd.mpi_ops.run


def test_the_version_is_that_of_horovod_s_interface():
    assert hvd.__version__ == "0.28.1"


@pytest.fixture
def world():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.usefixtures("world")
def test_an_optimizer_says_what_it_was_given():
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=2,
        gradient_predivide_factor=3.0,
        sparse_as_dense=True,
    )
    assert isinstance(optimizer, torch.optim.SGD)
    assert isinstance(optimizer, hvd.optimizer._DistributedOptimizer)
    assert (optimizer.backward_passes_per_step, optimizer.op) == (2, hvd.Average)
    assert (optimizer.gradient_predivide_factor, optimizer.sparse_as_dense) == (3.0, True)
    assert optimizer.process_set is hvd.global_process_set
    assert optimizer._parameter_names == {model.weight: "weight", model.bias: "bias"}
    optimizer.set_backward_passes_per_step(4)
    assert optimizer.backward_passes_per_step == 4
    with pytest.raises(ValueError, match="at least 1"):
        optimizer.backward_passes_per_step = 0
    with pytest.raises(AttributeError):
        optimizer.op = hvd.Sum


@pytest.mark.usefixtures("world")
def test_an_optimizer_of_adasum_says_so_too(monkeypatch):
    monkeypatch.setattr("datasvc.trainer.job.runtime.is_elastic", lambda: True)
    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=hvd.Adasum, backward_passes_per_step=2)
    assert isinstance(optimizer, hvd.optimizer._DistributedAdasumOptimizer)
    assert (optimizer.op, optimizer.backward_passes_per_step) == (hvd.Adasum, 2)
    assert list(optimizer._parameter_names.values()) == ["weight", "bias"]
    optimizer.set_backward_passes_per_step(3)
    assert optimizer.backward_passes_per_step == 3
    for change in (optimizer.set_backward_passes_per_step, partial(setattr, optimizer, "backward_passes_per_step")):
        with pytest.raises(ValueError, match="must be at least 1, not 0"):
            change(0)
    assert optimizer.backward_passes_per_step == 3


@pytest.mark.usefixtures("world")
def test_the_elastic_loop_enters_the_job_anew_by_the_reset_that_it_is_given():
    called = []

    def train(state):
        called.append("train")
        if len(called) == 1:
            raise hvd.elastic.HostsUpdatedInterrupt
        return state.epoch

    def reset():
        called.append("reset")
        hvd.shutdown()
        hvd.init()

    assert hvd.common.elastic.run_fn(train, reset)(hvd.elastic.ObjectState(epoch=5)) == 5
    assert called == ["train", "reset", "train"]


def test_the_compressor_that_changes_nothing_is_a_class_of_its_own():
    assert hvd.Compression.none is hvd.compression.NoneCompressor
    assert issubclass(hvd.compression.FP16Compressor, hvd.compression.Compressor)
    assert not issubclass(hvd.compression.FP16Compressor, hvd.compression.NoneCompressor)


def test_common_util_answers_as_horovod_s(monkeypatch):
    util = hvd.common.util
    assert util.extension_available("torch")
    assert not util.extension_available("tensorflow", verbose=True)
    assert (util.mpi_built(verbose=True), util.gloo_built()) == (hvd.mpi_built(), hvd.gloo_built())
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match="supports PyTorch only"):
        util.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__)
    assert [util.num_rank_is_power_2(n) for n in range(5)] == [False, True, True, False, True]
    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert [util.is_iterable(x) for x in ([], 1)] == [True, False]
    assert util.is_version_greater_equal_than("1.10.0+cu113", "1.9.1")
    assert not util.is_version_greater_equal_than("1.9", "1.9.1")
    with pytest.raises(ValueError, match="versions must be strings"):
        util.is_version_greater_equal_than("1.9.0", "1.9")
    monkeypatch.setenv("BEFORE", "1")
    with util.env(BEFORE="2", NEW="3", LEFT=None):
        assert (os.environ["BEFORE"], os.environ["NEW"], "LEFT" in os.environ) == ("2", "3", False)
    assert (os.environ["BEFORE"], "NEW" in os.environ) == ("1", False)
    choose = hvd.mpi_ops.handle_average_backwards_compatibility
    assert choose(None, None) is hvd.Average
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert choose(None, False) is hvd.Sum
