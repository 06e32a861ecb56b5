"""Everything works without a launcher and without a network."""

import enum
import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

import datasvc.trainer as hvd


@pytest.fixture(autouse=True)
def world():
    hvd.init()
    yield
    hvd.shutdown()


def test_every_public_name_resolves():
    assert all(getattr(hvd, name) is not None for name in hvd.__all__)


def test_the_package_alone_does_not_load_torch():
    code = "import sys, trainer, datasvc.trainer.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_horovods_name_for_the_interface_is_what_gloo_gets(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "eth1")
    hvd.shutdown()
    hvd.init()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"


def test_the_place_is_that_of_a_single_rank():
    assert (hvd.size(), hvd.rank(), hvd.local_size(), hvd.local_rank()) == (1, 0, 1, 0)
    assert (hvd.cross_size(), hvd.cross_rank(), hvd.is_initialized()) == (1, 0, True)


def test_init_again_does_nothing_and_shutdown_again_neither():
    hvd.init()
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()


@pytest.mark.parametrize("value", [3.0, [1, 2], None, np.ones(2)])
@pytest.mark.parametrize(
    "call",
    [
        hvd.allreduce,
        hvd.allreduce_,
        lambda value: hvd.allreduce(value, compression=hvd.Compression.fp16),
        lambda value: hvd.grouped_allreduce([torch.ones(2), value]),
        hvd.allgather,
        hvd.alltoall,
        hvd.reducescatter,
        lambda value: hvd.broadcast(value, 0),
        lambda value: hvd.broadcast_(value, 0),
    ],
)
def test_a_value_that_is_no_tensor_is_refused_with_what_to_do(call, value):
    with pytest.raises(TypeError, match=r"expected a tensor, not .*torch\.as_tensor"):
        call(value)


@pytest.mark.parametrize("call", [hvd.size, hvd.rank, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))])
def test_the_error_of_a_call_before_init_has_advice(call):
    hvd.shutdown()
    with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
        call()


def test_collectives_return_their_input_by_value():
    tensor = torch.tensor([[1.0, 2.0]])
    for result in (hvd.allreduce(tensor), hvd.allgather(tensor), hvd.broadcast(tensor, 0)):
        assert torch.equal(result, tensor)
        assert result.data_ptr() != tensor.data_ptr()


def test_in_place_variants_return_their_input_itself():
    tensor = torch.ones(3, 2).t()
    assert hvd.allreduce_(tensor, op=hvd.Sum, prescale_factor=2.0) is tensor
    assert hvd.synchronize(hvd.broadcast_async_(tensor, 0)) is tensor
    assert hvd.grouped_allreduce_([tensor])[0] is tensor
    assert torch.equal(tensor, torch.full((2, 3), 2.0))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_scaled_integers_are_truncated_toward_zero(dtype):
    tensor = torch.tensor([-5, 5, 7], dtype=dtype)
    assert hvd.allreduce(tensor, postscale_factor=0.5).tolist() == [-2, 2, 3]


def test_objects_are_copied():
    original = {"a": [1, 2]}
    assert hvd.broadcast_object(original) == original
    assert hvd.allgather_object(original) == [original]


def test_average_is_deprecated_and_excludes_op():
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        assert hvd.allreduce(torch.ones(1), average=False).item() == 1.0
    with pytest.raises(ValueError, match="either op or average"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)


def test_misuse_that_needs_no_other_rank_is_a_value_error():
    with pytest.raises(ValueError, match="root rank 1 must be one of the ranks"):
        hvd.broadcast(torch.ones(1), root_rank=1)
    with pytest.raises(ValueError, match="cannot be reduced"):
        hvd.allreduce(torch.ones(1, dtype=torch.complex64))
    with pytest.raises(ValueError, match="at least one tensor"):
        hvd.grouped_allreduce([])
    with pytest.raises(ValueError, match="dense"):
        hvd.allreduce(torch.ones(2, 2).to_sparse())


def test_a_scalar_cannot_be_gathered_and_the_trainer_continues():
    with pytest.raises(hvd.HorovodInternalError, match="cannot be gathered"):
        hvd.allgather(torch.tensor(1.0))
    hvd.barrier()


def test_gradients_flow_through_the_synchronous_operations():
    x = torch.ones(2, 2, requires_grad=True)
    (hvd.allreduce(x, prescale_factor=3.0) + hvd.allgather(x) + hvd.broadcast(x, 0)).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 2), 5.0))


def test_the_wrapped_optimizer_is_one_of_its_class_and_steps_like_it():
    plain, wrapped = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    wrapped.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, wrapped)]
    optimizers[1] = hvd.DistributedOptimizer(optimizers[1], wrapped.named_parameters())
    assert isinstance(optimizers[1], torch.optim.SGD)
    for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert torch.equal(plain.weight, wrapped.weight)
    assert optimizers[1].state_dict().keys() == optimizers[0].state_dict().keys()


def test_step_hooks_of_the_user_run_once():
    model = torch.nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.load_state_dict(optimizer.state_dict())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert calls == [1]


def test_a_scheduler_made_before_the_wrapping_changes_the_learning_rate():
    plain = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain)
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_named_parameters_must_be_unique_tuples_that_cover_all():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="sequence of tuples"):
        hvd.DistributedOptimizer(optimizer, model.parameters())
    with pytest.raises(ValueError, match="must be unique; found twice: a"):
        hvd.DistributedOptimizer(optimizer, [("a", model.weight), ("a", model.bias)])
    with pytest.raises(ValueError, match="lacks 1 of the optimizer's parameters"):
        hvd.DistributedOptimizer(optimizer, [("a", model.weight)])


def test_predividing_needs_an_average_and_passes_must_be_positive():
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="only supported with op=Average"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="at least 1"):
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=0)


def test_the_state_of_lbfgs_is_refused():
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]), 0)


def test_the_names_of_unnamed_operations_after_a_join_do_not_depend_on_those_before():
    hvd.join()
    fresh = hvd.allreduce_async(torch.ones(1))
    hvd.shutdown()
    hvd.init()
    hvd.allreduce(torch.ones(1))
    hvd.join()
    used = hvd.allreduce_async(torch.ones(1))
    hvd.shutdown()
    assert fresh.name == used.name


class Colour(enum.Enum):
    RED = 1


def test_objects_that_pickle_refuses_travel_too_and_classes_of_modules_stay_what_they_are():
    class Local:
        def __init__(self, value):
            self.value = value

    double, local, colour = hvd.allgather_object((lambda x: 2 * x, Local(3), Colour.RED))[0]
    assert (double(4), local.value, type(local).__name__) == (8, 3, "Local")
    assert colour is Colour.RED
    with pytest.raises(TypeError, match="cannot pickle"):
        hvd.allgather_object(threading.Lock())


@pytest.mark.parametrize("params", [torch.ones(2, 2), [1, 2], [torch.ones(1), "b"]])
def test_what_is_no_list_of_parameters_is_refused_before_anything_travels(params):
    with pytest.raises(ValueError, match="list of tensors such as"):
        hvd.broadcast_parameters(params, 0)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_adam_gets_no_dense_zero_gradient(sparse_as_dense):
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    plain = torch.optim.SparseAdam(embedding.parameters())
    optimizer = hvd.DistributedOptimizer(plain, sparse_as_dense=sparse_as_dense)
    hvd.broadcast_optimizer_state(optimizer, 0)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
