"""What a program sets for its own tensors, such as `torch.device("meta")`, changes no tensor of this package."""

import ast
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._device import _device_constructors

import datasvc
import datasvc.trainer as hvd

ROOT = Path(datasvc.__file__).parents[1]


@contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CONTEXTS = {
    "meta": lambda: torch.device("meta"),
    "default device": default_device,
    "default dtype": default_dtype,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.fixture(params=CONTEXTS)
def context(request):
    return CONTEXTS[request.param]


@pytest.fixture
def world():
    hvd.init()
    yield
    hvd.shutdown()


def files():
    folders = [path for path in (ROOT / "datasvc").iterdir() if not path.is_symlink()]
    for folder in [*folders, ROOT / "loaders", ROOT / "trainer"]:
        yield from folder.rglob("*.py") if folder.is_dir() else [folder] if folder.suffix == ".py" else []


def test_every_tensor_of_this_package_is_made_on_a_named_device():
    """pytorch/pytorch#105963, pytorch/pytorch#82412: a function without a device takes the default of the program."""
    names = {function.__name__ for function in _device_constructors()} - {"sparse_coo_tensor"}  # takes that of values
    without, num_calls = [], 0
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
                if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
                    continue
                num_calls += 1
                if not any(keyword.arg in ("device", None) for keyword in node.keywords):
                    without.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert num_calls > 30
    assert not without


def test_a_checkpoint_is_saved_and_restored_where_a_model_is_made_without_memory(tmp_path, context):
    """pytorch/pytorch#105963: the usual reason for a meta device is a model that a checkpoint will fill."""
    repository = datasvc.open(str(tmp_path), create=True)
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    state = {"w": weight, "part": weight[:, 1:], "array": np.ones(3), "empty": weight[:0]}
    with repository.models.manager("m") as model:
        with context():
            model.save(state, step=1).result()
            model.save(state, step=2).result()
        model.save(state, step=3).result()
        for number in (1, 2, 3):
            with context():
                restored = model.restore(f"m@{number}").state
            assert {tensor.device.type for tensor in restored.values()} == {"cpu"}
            assert not any(tensor.is_inference() for tensor in restored.values())
            assert torch.equal(restored["w"], weight)
            assert torch.equal(restored["part"], weight[:, 1:])
        target = {"w": torch.zeros(2, 3, dtype=torch.float32, device="cpu"), "part": weight.new_zeros(2, 2)}
        with torch.inference_mode():
            other = torch.zeros(2, 4, dtype=torch.float32, device="cpu")[:, 1:]
        with context():
            filled = model.restore(into=target).state
            model.restore(into={"w": other})
            net = torch.nn.Linear(3, 2, bias=False, device="cpu", dtype=torch.float32)
            repository.models.load_into(net, "m", prefix="", rename={"w": "weight"}, strict=False)
        assert torch.equal(filled["w"], weight)
        assert torch.equal(filled["part"], weight[:, 1:])
        assert torch.equal(other, weight)
        assert torch.equal(net.weight, weight)


def test_objects_and_states_are_sent_between_ranks(context, world):
    """pytorch/pytorch#82412: a length on the meta device has no value, and ended the engine of every rank."""
    net = torch.nn.Linear(2, 2, device="cpu")
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with context():
        assert hvd.broadcast_object({"a": [1]}, 0) == {"a": [1]}
        assert hvd.allgather_object("a") == ["a"]
        hvd.broadcast_parameters(net.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        sent = torch.ones(2, device="cpu")
        assert hvd.allreduce(sent, op=hvd.Sum).tolist() == [1, 1]
        assert hvd.allgather(sent).tolist() == [1, 1]
        assert hvd.alltoall(sent).tolist() == [1, 1]
        assert hvd.broadcast(sent, 0).tolist() == [1, 1]
    assert hvd.broadcast_object("after", 0) == "after"


def test_a_job_begins_in_any_context(context):
    with context():
        hvd.init()
    try:
        assert hvd.allgather_object("a") == ["a"]
    finally:
        hvd.shutdown()
