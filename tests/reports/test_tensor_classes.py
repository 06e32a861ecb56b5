"""Tensors of other classes than torch's own: wrappers of other tensors, and what has no values to store."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import datasvc
import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.models.restoring.load_into_module import load_into
from datasvc.models.tensors.state_tree import encode_state, flatten


class Halves(torch.Tensor):
    """Integer codes with a scale: a wrapper that does not say where its values are."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __repr__(self):
        return "Halves"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        plain = torch.utils._pytree.tree_map(lambda x: x.codes.float() * x.scale if isinstance(x, cls) else x, args)
        return func(*plain, **(kwargs or {}))


class Quantised(Halves):
    """The same, with the two methods that libraries of quantised weights have."""

    def __tensor_flatten__(self):
        return ["codes"], {"scale": self.scale, "kind": (torch.int8, torch.Size([2]))}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        assert context["kind"] == (torch.int8, torch.Size([2]))
        assert tuple(size) == tuple(inner["codes"].shape)
        return Quantised(inner["codes"], context["scale"])


def codes(*numbers):
    return torch.tensor(numbers, dtype=torch.int8)


@pytest.fixture
def repository(tmp_path):
    return datasvc.open(str(tmp_path / "repo"), create=True)


def save(repository, way, state):
    if way == "save":
        return repository.models.save("m", state, step=1)
    with repository.models.manager("m") as model:
        return model.save(state, step=1).result()


@pytest.mark.parametrize("way", ["save", "manager"])
def test_the_moments_of_an_eight_bit_optimizer_keep_their_own_values(repository, way):
    """pytorch/ao#2338: wrappers have no address, so the first one was stored in place of all others of its shape."""
    pair = TwoTensor(torch.ones(2), torch.full((2,), 2.0))
    nested = TwoTensor(Quantised(codes(5, 6), 0.5), Quantised(codes(8, 9), 0.5))
    state = {"a": Quantised(codes(1, 2), 0.5), "b": Quantised(codes(7, 8), 0.25), "pair": pair, "nested": [nested]}
    save(repository, way, state)
    restored = repository.models.restore("m").state
    assert [type(restored[name]) for name in ("a", "b", "pair")] == [Quantised, Quantised, TwoTensor]
    assert ((restored["a"] + 0).tolist(), (restored["b"] + 0).tolist()) == ([0.5, 1.0], [1.75, 2.0])
    assert (restored["pair"].a.tolist(), restored["pair"].b.tolist()) == ([1, 1], [2, 2])
    assert restored["nested"][0].b.codes.tolist() == [8, 9]
    assert not repository.models.verify("m", deep=True).problems
    # The part of a state is restored by the names of the inner tensors.
    assert repository.models.restore("m", only=["b"]).state["b.inner.codes"].tolist() == [7, 8]


def test_a_restore_fills_the_tensors_inside_a_wrapper_in_place(repository):
    """huggingface/optimum-quanto#100: the parameters of the model stay what they are, with the stored values."""
    repository.models.save("m", {"model": {"w": Quantised(codes(7, 8), 0.25)}, "n": torch.ones(1)}, step=1)
    target = Quantised(codes(0, 0), 0.25)
    state = repository.models.restore("m", into={"model": {"w": target}, "n": torch.zeros(1)}).state
    assert state["model"]["w"] is target
    assert target.codes.tolist() == [7, 8]
    for other in (Quantised(codes(0, 0), 0.5), TwoTensor(torch.zeros(2), torch.zeros(2))):
        with pytest.raises(ConfigError, match=r"model\.w is a .* nothing was restored"):
            repository.models.restore("m", into={"model": {"w": other}})
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(Quantised(codes(0, 0), 0.25), requires_grad=False)
    with pytest.raises(ConfigError, match="the values of w, a Quantised, are in other tensors"):
        load_into(module, repository.models.restore("m"))


def test_a_wrapper_of_a_class_that_is_not_imported_is_not_made_up(repository, monkeypatch):
    """huggingface/transformers#32364: what reads a quantised checkpoint without the library must say so."""
    repository.models.save("m", {"w": Quantised(codes(7, 8), 0.25)}, step=1)
    monkeypatch.delattr(f"{__name__}.Quantised")
    with pytest.raises(ConfigError, match="Quantised, which this program has not imported: import it"):
        repository.models.restore("m")
    assert not repository.models.verify("m", deep=True).problems  # nothing of the class is needed for that


def test_a_release_that_reads_no_wrappers_refuses_the_state(repository):
    """A dict in place of a weight is no restore: such a state has the next format."""
    assert json.loads(encode_state(flatten({"w": Quantised(codes(7, 8), 0.25)})[0]))["format"] == 2
    assert json.loads(encode_state(flatten({"w": torch.ones(1), "s": {1}})[0]))["format"] == 1


def fake_tensor():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


def masked_tensor():
    from torch.masked import masked_tensor

    return masked_tensor(torch.ones(2), torch.tensor([True, False]))


WITHOUT_VALUES = {
    "Halves": lambda: Halves(codes(1, 2), 0.5),
    "FakeTensor": fake_tensor,
    "no shape yet": torch.nn.UninitializedParameter,
    "meta": lambda: torch.ones(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested, float32": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "MaskedTensor": masked_tensor,
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "sparse_coo": lambda: torch.eye(2).to_sparse(),
    "sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
    "mkldnn": lambda: torch.eye(2).to_mkldnn(),
    "MaskedArray": lambda: np.ma.masked_array([1.0, 2.0], mask=[True, False]),
    "matrix": lambda: np.asmatrix(np.eye(2)),
    "uint4": lambda: torch.ones(2, dtype=torch.uint8).view(torch.uint4),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["save", "manager"])
@pytest.mark.parametrize("what", WITHOUT_VALUES)
def test_a_tensor_whose_values_cannot_be_read_is_refused_with_its_place(repository, what, way):
    """pytorch/pytorch#98921: a masked array that lost its mask, a fake tensor that was saved as numbers."""
    with pytest.raises(ConfigError, match=rf"moments\.0.*{what}"):
        save(repository, way, {"moments": [WITHOUT_VALUES[what]()]})
    assert not repository.models.names()


def test_empty_tensors_of_one_shape_are_not_tied(repository):
    state = repository.models.restore(
        str(repository.models.save("m", {"a": torch.ones(0, 3), "b": torch.ones(0, 3)}, step=1))
    ).state
    assert state["a"] is not state["b"]
    assert state["a"].shape == (0, 3)


def test_a_quantised_model_is_broadcast_by_what_it_is_made_of(monkeypatch):
    """pytorch/ao#2338: a copy into a wrapper can be lost, so a rank would keep its own weights without an error."""
    sent = []
    monkeypatch.setattr(
        "datasvc.trainer.optim.broadcast_state.broadcast_async_",
        lambda tensor, root, name: sent.append((name, tensor.tolist())) or SimpleNamespace(wait=lambda: None),
    )
    nested = TwoTensor(Quantised(codes(5, 6), 0.5), Quantised(codes(8, 9), 0.5))
    hvd.broadcast_parameters({"w": nested, "b": torch.ones(1), "n": 1}, 0)
    assert sent == [("parameters.w.a.codes", [5, 6]), ("parameters.w.b.codes", [8, 9]), ("parameters.b", [1])]


def test_a_wrapper_is_not_reduced_as_if_it_had_memory():
    hvd.init()
    try:
        for tensor in (Halves(codes(1, 2), 0.5), torch.ones(2, device="meta")):
            with pytest.raises(ValueError, match="has no memory of its own"):
                hvd.broadcast_(tensor, 0)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        optimizer.state[optimizer.param_groups[0]["params"][0]] = {"m": Quantised(codes(1, 2), 0.5)}
        hvd.broadcast_optimizer_state(optimizer, 0)
    finally:
        hvd.shutdown()
