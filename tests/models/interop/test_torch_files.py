import collections
import errno
import io
import os
import signal
import subprocess
import sys
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import nn

from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, UnavailableError
from datasvc.models import restore, save
from datasvc.models.interop import export_model, import_model, torch_reader
from datasvc.models.interop.torch_reader import read_torch_file, save_to
from tests.examples import examples
from tests.support.fuzzing import counts_refusals

STATE = {
    "model": collections.OrderedDict(w=torch.randn(4, 3), b=torch.randn(3)),
    "optimizer": {
        "state": {0: {"exp_avg": torch.randn(4, 3), "step": torch.tensor(2.0)}},
        "param_groups": [{"lr": 0.1}],
    },
    "epoch": 3,
}


ONES = torch.ones(1 << 18)
NUMBERS = {f"{number}": number for number in range(10_000)}


class Runs:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def bytes_of(value, **how):
    sink = io.BytesIO()
    torch.save(value, sink, **how)
    return sink.getvalue()


def test_a_state_dict_becomes_the_model_of_a_version(repository, tmp_path):
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    torch.save(net.state_dict(), tmp_path / "net.pth")
    assert import_model(repository, tmp_path / "net.pth", "net").format == "torch"
    found = restore(repository, "net").state["model"]
    assert found.keys() == net.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_whole_checkpoint_keeps_its_tree(repository, tmp_path, is_zip):
    (tmp_path / "x").write_bytes(bytes_of(STATE, _use_new_zipfile_serialization=is_zip))
    import_model(repository, tmp_path / "x", "m")
    save(repository, "n", STATE, step=0)
    a, b = (repository.entry(repository.resolve("models", name)).content for name in ("m", "n"))
    assert (a["tensors"], a["state"]) == (b["tensors"], b["state"])


def test_an_exported_file_is_loaded_by_torch_without_trust(repository, tmp_path):
    moments = collections.namedtuple("moments", ["mean", "square"])(1, torch.ones(2))  # noqa: PYI024
    save(repository, "m", {**STATE, "moments": moments}, step=0)
    (file,) = export_model(repository, "m", tmp_path / "out", "torch").files
    found = torch.load(file, weights_only=True)
    assert type(found["model"]) is collections.OrderedDict
    assert type(found["moments"]) is tuple
    assert found["optimizer"]["param_groups"] == [{"lr": 0.1}]
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], STATE["optimizer"]["state"][0]["exp_avg"])


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_a_file_never_runs(repository, tmp_path, is_zip):
    trap = tmp_path / "ran"
    (tmp_path / "x.pt").write_bytes(
        bytes_of({"w": torch.ones(1), "evil": Runs(trap)}, _use_new_zipfile_serialization=is_zip)
    )
    with pytest.raises(ConfigError, match=r"holds posix.mkdir, and to create one would execute code"):
        import_model(repository, tmp_path / "x.pt", "m")
    assert not trap.exists()


def test_a_class_is_refused_by_its_name(repository, tmp_path):
    torch.save({"model": nn.Linear(1, 1)}, tmp_path / "module.pt")
    with pytest.raises(ConfigError, match=r"holds torch.nn.modules.linear.Linear.*state_dict\(\)"):
        import_model(repository, tmp_path / "module.pt", "m")
    torch.jit.script(nn.Linear(1, 1)).save(tmp_path / "script.pt")
    with pytest.raises(ConfigError, match="is a TorchScript program"):
        import_model(repository, tmp_path / "script.pt", "m")


@pytest.mark.parametrize("kind", ["compressed", "flipped", "cut off", "claims more"])
def test_a_damaged_archive_is_refused(repository, tmp_path, kind):
    path = tmp_path / "x.pt"
    content = bytearray(bytes_of({"w": torch.arange(1000.0)}))
    if kind == "compressed":
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for entry in old.infolist():
                new.writestr(entry.filename, old.read(entry))
        content = path.read_bytes()
    elif kind == "flipped":
        content[content.index(torch.arange(500.0, 510.0).numpy().tobytes())] ^= 1
    elif kind == "cut off":
        del content[-100:]
    else:
        # 1000 elements, as its pickle says, become 65512.
        content = rezipped(content, lambda raw: raw.replace(b"M\xe8\x03", b"M\xe8\xff"))
    path.write_bytes(content)
    with pytest.raises(CorruptDataError):
        import_model(repository, path, "m")
    assert repository.names("models") == []


def test_a_tensor_that_repeats_one_value_a_billion_times_is_refused(repository, tmp_path):
    torch.save({"w": torch.zeros(1).expand(1 << 30)}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="'w' repeats few values"):
        import_model(repository, tmp_path / "x.pt", "m")


def doubled(levels):
    value = []
    for _ in range(levels):
        value = [value, value]
    return {"w": torch.ones(1), "x": value}


class Reduced:
    """Pickled as a call of anything."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced[:2]


@pytest.mark.parametrize("is_zip", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (doubled(60), "too many values"),
        ({"x": Reduced(bytearray, (1 << 40,))}, r"more memory to read than the limit, 134.22 MB .*reader_memory"),
        ({"x": Reduced(torch.Tensor, (1 << 40,))}, "needs more memory"),
        ({"x": Reduced(torch.Tensor, (9,))}, "the values of tensor 'x' are not in the file"),
        ({"x": torch.eye(3).to_sparse()}, "holds torch.sparse_coo; only dense tensors"),
        ({"x": Reduced(torch.storage.UntypedStorage, (1 << 40,))}, "needs more memory"),
        ({(1, 2): torch.ones(1)}, "a key of type tuple, which is neither a string nor an int"),
        ({"x": [0] * 20_000}, "too many values"),
        ({f"w{n}": ONES[:] for n in range(40)}, "share so much memory"),
    ],
)
def test_what_would_take_more_memory_than_its_file_is_refused(repository, tmp_path, value, message, is_zip):
    (tmp_path / "x.pt").write_bytes(bytes_of(value, _use_new_zipfile_serialization=is_zip))
    with pytest.raises((ConfigError, CorruptDataError), match=message):
        import_model(repository, tmp_path / "x.pt", "m")


def test_everything_plain_that_torch_saves_is_read(repository, tmp_path):
    net = nn.Linear(2, 2)
    net.weight.note = "an attribute"
    plain = {
        "param": net.weight,
        "tied": [torch.ones(3)] * 2,
        "small": torch.ones(2).to(torch.float8_e4m3fn),
        "unsigned": torch.ones(2, dtype=torch.uint16),
        "bytes": b"\xff\0",
        "counter": collections.Counter("abca"),
        "shape": torch.Size([2, 3]),
        "numbers": [1 << 70, -0.5, True, None],
        "shared": [(0.9, 0.999)] * 3,
    }
    torch.save(plain, tmp_path / "x.pt")
    import_model(repository, tmp_path / "x.pt", "m")
    found = restore(repository, "m").state
    assert torch.equal(found["param"], net.weight)
    assert found["bytes"] == plain["bytes"]
    assert found["counter"] == {"a": 2, "b": 1, "c": 1}
    assert found["shared"] == plain["shared"]
    assert found["numbers"] == plain["numbers"]


CHILD = """
import resource, sys
from datasvc.errors import DatasvcError
from datasvc.models.interop import import_model
from datasvc.repository import Repository
import torch
repository = Repository.open(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[2:]:
    try:
        import_model(repository, path, "m", reader_memory_bytes=200 << 20)
    except DatasvcError:
        continue
    raise SystemExit(f"{path} was imported")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.slow
def test_hostile_files_are_refused_with_little_memory(repository, tmp_path):
    hostile = {
        "lists": doubled(60),
        "bytearray": {"x": Reduced(bytearray, (400 << 20,))},
        "counters": {"x": [Reduced(collections.Counter, (NUMBERS,)) for _ in range(5000)]},
        "repeated": {"w": torch.zeros(1).expand(1 << 30)},
    }
    for name, value in hostile.items():
        torch.save(value, tmp_path / name)
    words = [sys.executable, "-c", CHILD, repository.url, *(str(tmp_path / name) for name in hostile)]
    grown_kb, reader_kb = map(int, subprocess.run(words, check=True, capture_output=True, text=True).stdout.split())
    assert grown_kb < 100 << 10
    assert 100 << 10 < reader_kb < 800 << 10  # torch itself takes some 300 MB


def test_a_dtype_that_cannot_be_stored_is_named_unless_it_is_left_out(repository, tmp_path, monkeypatch):
    # torch.save refuses the dtypes that cannot be stored today: a later torch may not.
    monkeypatch.setattr("datasvc.models.interop.importing.ITEM_BYTES", {"float32": 4})
    torch.save({"w": torch.ones(2, dtype=torch.float64), "v": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"w' is float64, which cannot be stored"):
        import_model(repository, tmp_path / "x.pt", "m")
    import_model(repository, tmp_path / "x.pt", "m", exclude=["w"])
    assert list(restore(repository, "m").state["model"]) == ["v"]


@counts_refusals(DatasvcError)
@examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_hostile_bytes_are_refused_in_our_words_and_never_run(repository, tmp_path, data):
    whole = bytes_of(
        {"w": torch.arange(3.0), "n": {"a": (1, "x")}}, _use_new_zipfile_serialization=data.draw(st.booleans())
    )
    raw = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "x.pt").write_bytes(raw)
    import_model(repository, tmp_path / "x.pt", "m", codec="none")


def test_views_are_imported_as_the_values_that_they_show(repository, tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    views = {"t": base.T, "part": base[1:, ::2], "conj": torch.tensor([1 + 2j]).conj(), "none": base[:0]}
    torch.save({"n": 1, **views}, tmp_path / "x.pt")
    import_model(repository, tmp_path / "x.pt", "m")
    found = restore(repository, "m").state
    assert all(torch.equal(found[name], view.resolve_conj()) for name, view in views.items())


@pytest.mark.slow
def test_a_file_that_is_truncated_while_it_is_read_is_an_error(tmp_path, readers):
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(1 << 20)}, path)
    (tensor,) = read_torch_file(path, 1 << 30).tensors
    os.truncate(path, 1000)
    with pytest.raises(CorruptDataError, match=r"was truncated while it was read|ended with SIGBUS"):
        list(tensor.blocks())
    ((child, _),) = readers.values()
    child.process.wait()


@pytest.mark.slow
def test_a_file_that_takes_too_much_processor_time_is_refused(tmp_path, readers):
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    (tensor,) = read_torch_file(tmp_path / "x.pt", 1 << 30).tensors
    ((child, _),) = readers.values()
    child.process.send_signal(signal.SIGXCPU)
    child.process.wait()
    with pytest.raises(CorruptDataError, match="takes too long to read for its size"):
        list(tensor.blocks())


def test_the_memory_of_the_reader_is_what_the_caller_allows(repository, tmp_path, monkeypatch):
    def start(_module, message, *, answers):
        assert answers
        raise OSError(f"started with {message}")

    monkeypatch.setattr(torch_reader, "ChildProcess", start)
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    with pytest.raises(UnavailableError, match=r"started with \(12345, "):
        import_model(repository, tmp_path / "x.pt", "m", reader_memory_bytes=12345)


def test_a_full_disk_is_called_so():
    class Full(io.BytesIO):
        def write(self, content):
            if self.tell() > 2000:
                raise OSError(errno.ENOSPC, "no space")
            return super().write(content)

    with pytest.raises(OSError, match="no space"):
        save_to(Full(), {"w": torch.ones(10_000)})


def rezipped(content, change):
    sink = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(sink, "w") as new:
        for entry in old.infolist():
            raw = old.read(entry)
            new.writestr(entry.filename, change(raw) if entry.filename.endswith("data.pkl") else raw)
    return sink.getvalue()
