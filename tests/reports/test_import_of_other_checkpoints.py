"""Checkpoints of other programs as they are: with arguments, NumPy values, prefixes of wrappers and rare dtypes."""

import argparse
import collections
import dataclasses
import enum
import pathlib

import numpy as np
import pytest
import torch

import datasvc
from datasvc.errors import ConfigError
from datasvc.models.interop.importing import read_foreign
from datasvc.models.restoring.load_into_module import load_into
from tests.models.interop.conftest import readers, shared_reader  # noqa: F401 - fixtures


class Mode(enum.Enum):
    A = 1


@dataclasses.dataclass
class Options:
    rate: float = 0.5


class AttributeDict(dict):
    pass


@pytest.fixture
def repository(tmp_path):
    return datasvc.open(str(tmp_path / "repo"), create=True)


def write(tmp_path, other, **options):
    path = tmp_path / "c.pt"
    torch.save({"model": {"w": torch.ones(2)}, "other": other}, path, **options)
    return path


REFUSED = {
    "argparse.Namespace": argparse.Namespace(lr=0.1),
    "pathlib": pathlib.PosixPath("/x"),
    "Options": Options(),
    "Mode": Mode.A,
    "torch.nn.modules.linear.Linear": torch.nn.Linear(1, 1),
    "Mode.": Mode,
    "getattr": collections.deque.append,
    "numpy.ndarray of object": np.array([1, "a"], object),
    "a dict with a key of type tuple": {(1, 2): 3},
    "sparse": torch.eye(2).to_sparse(),
    "numpy.dtype": np.dtype("float32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_legacy", [False, True])
def test_what_would_run_code_of_a_file_is_refused_only_if_it_is_kept(repository, tmp_path, is_legacy):
    """Comfy-Org/ComfyUI#7425, ROCm/Megatron-LM#56: the weights of a checkpoint beside the arguments."""
    # The old format keeps the source of modules in the file, which torch does not read.
    values = {what: value for what, value in REFUSED.items() if not (is_legacy and "Linear" in what)}
    path = write(tmp_path, list(values.values()), _use_new_zipfile_serialization=not is_legacy)
    refused = read_foreign(path).refused
    for number, what in enumerate(values):
        assert what.rstrip(".") in refused[f"other.{number}"]
    with pytest.raises(
        ConfigError, match=r"holds argparse.Namespace.*other\.0 \(and (9|10) more.*--exclude other\.0"
    ):
        repository.models.import_(path, "all")
    repository.models.import_(path, "m", exclude=["other"])
    state = repository.models.restore("m").state
    assert {key: list(part) for key, part in state.items()} == {"model": ["w"]}
    for how in [] if is_legacy else [{"only": ["model"]}, {"rename": {"model": "net"}}]:
        repository.models.import_(path, "m", **how)
        state = repository.models.restore("m").state
        assert [tensor.tolist() for tensor in state.values()] == [[1, 1]]
    with pytest.raises(ConfigError, match=r"so it is refused: other\.1 \(and"):
        repository.models.import_(path, "all", exclude="other.0")
    with pytest.raises(ConfigError, match="no tensor matches 'others'"):
        repository.models.import_(path, "m", exclude=["others"])


def test_numbers_and_arrays_of_numpy_are_data(repository, tmp_path):
    """jtabox/safetensors-converter#2: the best metric as a NumPy scalar made a checkpoint unreadable."""
    values = {
        "best": np.float64(0.5),
        "when": np.datetime64("2026-01-02"),
        "history": np.arange(6.0).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "big-endian": np.arange(3, dtype=">f4"),
        "seen": collections.defaultdict(list, a=[1]),
        "counts": collections.Counter(a=1),
    }
    repository.models.import_(write(tmp_path, values), "m")
    state = repository.models.restore("m").state["other"]
    assert (type(state["best"]), state["best"], state["when"]) == (np.float64, 0.5, np.datetime64("2026-01-02"))
    for name in ("history", "fortran", "big-endian"):
        assert state[name].tolist() == values[name].tolist()
    assert (state["seen"], type(state["counts"])) == ({"a": [1]}, collections.Counter)


def test_a_module_that_is_blocked_is_refused_whatever_is_chosen(repository, tmp_path):
    class Evil:
        def __reduce__(self):
            import os

            return os.system, ("true",)

    with pytest.raises(ConfigError, match="system"):
        repository.models.import_(write(tmp_path, Evil()), "m", only=["model"])


@pytest.mark.parametrize("wrap", ["compiled", "DataParallel", "both", "part"])
def test_a_compiled_or_wrapped_model_takes_a_plain_version(repository, wrap):
    """pytorch/pytorch#101107: the names of a compiled model begin with _orig_mod."""

    def make():
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))

    def wrapped():
        net = make()
        if wrap == "part":
            net[0] = torch.compile(net[0])
        if wrap in ("DataParallel", "both"):
            net = torch.nn.DataParallel(net)
        return torch.compile(net) if wrap in ("compiled", "both") else net

    plain, other, target = make(), wrapped(), make()
    repository.models.save("plain", {"model": plain.state_dict()}, step=1)
    repository.models.save("wrapped", {"model": other.state_dict()}, step=1)
    x = torch.ones(1, 2)
    for source in ("plain", repository.models.restore("plain")):
        net = wrapped()
        load_into(net, source) if source != "plain" else repository.models.load_into(net, source)
        inner = [tensor for _, tensor in net.state_dict().items()]
        assert all(map(torch.equal, inner, plain.state_dict().values()))
    again = wrapped()
    repository.models.load_into(again, "wrapped")
    assert all(map(torch.equal, again.state_dict().values(), other.state_dict().values()))
    if wrap == "part":
        return
    stem = {"compiled": "_orig_mod", "DataParallel": "module", "both": "_orig_mod.module"}[wrap]
    with pytest.raises(ConfigError, match=rf"set prefix='model\.{stem}'"):
        repository.models.load_into(target, "wrapped")
    repository.models.load_into(target, "wrapped", prefix=f"model.{stem}")
    assert x.shape == (1, 2)


RARE = ["float8_e8m0fnu", "float4_e2m1fn_x2", "float8_e4m3fnuz", "float8_e5m2fnuz", "complex32", "bits8", "bits16"]
RARE += ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("name", RARE)
def test_a_dtype_of_torch_comes_back_with_its_bytes(repository, tmp_path, name):
    """pytorch/ao#2338: scales in E8M0 and packed FP4 are what quantised models are made of."""
    dtype = getattr(torch, name)
    content = torch.arange(64 * dtype.itemsize, dtype=torch.uint8) * 3
    tensor = content.view(dtype).reshape(8, 8)
    state = {"w": tensor, "part": tensor[:, 2:5], "empty": tensor[:0]}
    with repository.models.manager("m", codec="delta") as model:
        model.save(state, step=1).result()
        model.save(state, step=2).result()
    torch.save(state, tmp_path / "m.pt")
    repository.models.import_(tmp_path / "m.pt", "imported", prefix="")
    into = {key: torch.zeros_like(value.view(torch.uint8)).view(dtype) for key, value in state.items()}
    for restored in (
        repository.models.restore("m").state,
        repository.models.restore("imported").state,
        repository.models.restore("m", into=into).state,
    ):
        for key, value in state.items():
            assert restored[key].dtype == dtype
            assert (
                restored[key].contiguous().view(torch.uint8).tolist() == value.contiguous().view(torch.uint8).tolist()
            )
    assert not repository.models.verify("m", deep=True).problems


def test_numbers_that_are_not_finite_are_counted_in_every_dtype(repository):
    e8m0 = torch.tensor([127, 255, 0], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    fnuz = torch.tensor([0x80, 1, 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fnuz)
    repository.models.save("m", {"e8m0": e8m0, "fnuz": fnuz}, step=1)
    assert repository.models.restore("m").entry["num_nonfinite"] == {"e8m0": 1, "fnuz": 1}


def test_a_checkpoint_without_its_arguments_keeps_all_else(repository, tmp_path):
    """bioimage-io/core-bioimage-io-python#486: the optimizer's settings and the epoch went with the arguments."""
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = {"net": net.state_dict(), "opt": optimizer.state_dict(), "epoch": 3, "log": [1, 2], 5: ("a", None)}
    path = tmp_path / "c.pt"
    torch.save({**saved, "args": argparse.Namespace(lr=1), "more": {"args": [argparse.Namespace()], "x": 1}}, path)
    repository.models.import_(path, "m", exclude=["args", "more.args", "log.0"])
    state = repository.models.restore("m").state
    assert {key: state[key] for key in ("epoch", "log", 5, "more")} == {
        "epoch": 3, "log": [None, 2], 5: ("a", None), "more": {"x": 1}
    }  # fmt: skip
    assert "args" not in state
    again = torch.optim.AdamW(net.parameters())
    again.load_state_dict(state["opt"])
    assert again.param_groups[0]["lr"] == 0.25
    assert torch.equal(again.state[net.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"])
