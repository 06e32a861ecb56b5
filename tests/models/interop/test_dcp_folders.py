import io
import os
import pickle
import resource
import shutil
import signal
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from datasvc.errors import ConfigError, CorruptDataError, DatasvcError
from datasvc.models import restore, save
from datasvc.models.interop import export_model, import_model
from datasvc.models.interop.dcp_folders import build_tree, write_dcp_folder
from tests.examples import examples
from tests.support.fuzzing import counts_refusals

STATE = {
    "model": {"w": torch.randn(40, 3), "b": torch.randn(3).bfloat16(), "n": torch.tensor(5)},
    "optimizer": {"param_groups": [{"lr": 0.1, "params": [0, 1]}], "state": {"0": {"m": torch.randn(4)}}},
    "epoch": 3,
}


def written(folder, state=None):
    write_dcp_folder(folder, state or STATE)
    return folder


def repickled(folder, change):
    """Change the metadata as torch unpickles it."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def same(repository, a, b):
    entries = [repository.entry(repository.resolve("models", name)).content for name in (a, b)]
    return all(entries[0][field] == entries[1][field] for field in ("tensors", "state"))


@pytest.mark.slow
def test_a_folder_of_torch_is_imported_with_its_tree(repository, tmp_path):
    assert import_model(repository, written(tmp_path / "dcp"), "m").format == "dcp"
    save(repository, "n", STATE, step=0)
    assert same(repository, "m", "n")


def test_a_bare_state_dict_becomes_the_model(repository, tmp_path):
    import_model(repository, written(tmp_path / "dcp", {"a.w": torch.ones(3), "b": torch.zeros(2)}), "m")
    assert sorted(restore(repository, "m").state["model"]) == ["a.w", "b"]


def test_an_exported_folder_is_loaded_by_torch(repository, tmp_path):
    save(repository, "m", STATE, step=0)
    export_model(repository, "m", tmp_path / "out", "dcp")
    found = {"model": {name: torch.zeros_like(each) for name, each in STATE["model"].items()}}
    dcp.load(found, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert all(torch.equal(found["model"][name], each) for name, each in STATE["model"].items())
    import_model(repository, tmp_path / "out", "n")
    assert same(repository, "m", "n")


def test_blocks_that_several_ranks_wrote_become_one_tensor(repository, tmp_path):
    whole = torch.randn(6, 5)
    parts = {(0, 0): whole[:2], (2, 0): whole[2:, :3], (2, 3): whole[2:, 3:]}
    folder = written(tmp_path / "dcp", {f"{start}": part.contiguous() for start, part in parts.items()})

    def join(metadata):
        described, places = metadata.state_dict_metadata, metadata.storage_data
        chunks = []
        for start, part in parts.items():
            about = described.pop(f"{start}")
            chunks.append(ChunkStorageMetadata(torch.Size(start), part.shape))
            (index,) = [each for each in places if each.fqn == f"{start}"]
            places[MetadataIndex("w", start)] = places.pop(index)
        described["w"] = TensorStorageMetadata(about.properties, whole.shape, chunks)
        metadata.planner_data = None

    repickled(folder, join)
    import_model(repository, folder, "m")
    assert torch.equal(restore(repository, "m").state["model"]["w"], whole)


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_the_metadata_or_a_value_never_runs(repository, tmp_path):
    trap = tmp_path / "ran"
    folder = written(tmp_path / "dcp")
    repickled(folder, lambda metadata: metadata.planner_data.update(evil=Runs(trap)))
    with pytest.raises(ConfigError, match=r"refers to posix.mkdir, which is not part of DCP metadata"):
        import_model(repository, folder, "m")
    with pytest.raises(ConfigError, match=r"holds posix.mkdir"):
        import_model(repository, written(tmp_path / "b", {"w": torch.ones(1), "x": Runs(trap)}), "m")
    assert not trap.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",  # a bytearray of a terabyte
        pytest.param(b"\x80\x05]r\xff\xff\xff\xff.", marks=pytest.mark.slow),  # the last place of the memo
        b"\x80\x05cbuiltins\neval\n(X\x01\0\0\0" + b"1tR.",
        b"\x80\x05ctorch.distributed.checkpoint.metadata\nMetadata.__class__\n.",
        b"\x80\x05\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"(" * 100_000,
        b"",
    ],
)
def test_hostile_metadata_is_refused_without_memory(repository, tmp_path, raw):
    (tmp_path / ".metadata").write_bytes(raw)
    with pytest.raises((ConfigError, CorruptDataError)):
        import_model(repository, tmp_path, "m")


def test_few_bytes_that_make_many_objects_with_large_states_are_refused_at_the_limit(repository, tmp_path):
    # One dict of 1000 keys, which 20,000 objects would each copy: an object and its state take six bytes here.
    names = b"".join(b"X" + (8).to_bytes(4, "little") + b"%08d" % n + b"K\0" for n in range(1000))
    made = b"h\0)\x81h\1b" * 20_000
    head = b"\x80\2ctorch.distributed.checkpoint.metadata\nMetadata\nq\0}q\1(" + names + b"u"
    (tmp_path / ".metadata").write_bytes(head + b"](" + made + b"e.")
    with pytest.raises(ConfigError, match="needs more memory to read than the limit"):
        import_model(repository, tmp_path, "m")


@pytest.mark.parametrize(
    "copies",
    [
        pytest.param(b"ccollections\nOrderedDict\nq\2](" + b"h\2h\1\x85R" * 10_000, marks=pytest.mark.slow),
        pytest.param(b"]q\2(" + b"h\0h\3\x81" * 1000, marks=pytest.mark.slow),
    ],
)
def test_metadata_that_multiply_what_they_hold_are_refused(repository, tmp_path, copies):
    pairs = b"]q\1(" + b"K\1K\2\x86" * 1000 + b"e"
    head = b"\x80\2ctorch.distributed.checkpoint.metadata\nMetadata\nq\0" + pairs + b"(" + b"K\1" * 1000 + b"tq\3"
    (tmp_path / ".metadata").write_bytes(head + copies + b"e.")
    with pytest.raises((ConfigError, CorruptDataError), match=r"needs more memory|it holds a list"):
        import_model(repository, tmp_path, "m")


def test_metadata_larger_than_any_are_not_read(repository, tmp_path):
    with (tmp_path / ".metadata").open("wb") as file:
        file.truncate(1 << 40)
        file.write(b"\x80\x05\x8e" + (1 << 39).to_bytes(8, "little"))  # bytes of half a terabyte
    with pytest.raises(ConfigError, match="needs more memory to read than the limit"):
        import_model(repository, tmp_path, "m")


def test_a_compressed_value_is_refused(repository, tmp_path):
    folder = written(tmp_path / "dcp", {"x": "y" * 5000})
    (file,) = folder.glob("*.distcp")
    sink = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    file.write_bytes(sink.getvalue())
    repickled(folder, lambda metadata: vars(info(metadata, "x")).update(offset=0, length=len(sink.getvalue())))
    with pytest.raises(CorruptDataError, match="compressed archive"):
        import_model(repository, folder, "m")


def test_a_value_that_is_no_metadata_is_refused(repository, tmp_path):
    (tmp_path / ".metadata").write_bytes(b"\x80\x05\x96" + (3).to_bytes(8, "little") + b"abc.")  # a bytearray
    with pytest.raises(CorruptDataError, match="it holds a bytearray"):
        import_model(repository, tmp_path, "m")


def info(metadata, name):
    return next(each for index, each in metadata.storage_data.items() if index.fqn == name)


def leave_folder(metadata):
    info(metadata, "model.w").relative_path = "sub/../../secret"


def overlap(metadata):
    metadata.state_dict_metadata["model.w"].chunks *= 2


def leave_out(metadata):
    metadata.state_dict_metadata["model.w"].size = torch.Size([41, 3])


def other_tensor(metadata):
    a, b = vars(info(metadata, "model.w")), vars(info(metadata, "optimizer.state.0.m"))
    a["offset"], a["length"], b["offset"], b["length"] = b["offset"], b["length"], a["offset"], a["length"]


def nowhere(metadata):
    info(metadata, "model.w").offset = -1


def behind_the_end(metadata):
    max(metadata.storage_data.values(), key=lambda each: each.offset).length = 1 << 50


def shared(metadata):
    vars(info(metadata, "model.w")).update(vars(info(metadata, "model.b")))


def huge_list(metadata):
    metadata.planner_data["model.w"] = ("model", 1 << 60, "w")


def two_in_one_place(metadata):
    metadata.planner_data["model.w"] = metadata.planner_data["model.b"]


def nothing(metadata):
    metadata.storage_data = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (leave_folder, "file in the same folder"),
        (overlap, "do not cover each element exactly once"),
        (leave_out, "do not cover each element exactly once"),
        (other_tensor, "is not float32"),
        (nowhere, "has the offset -1"),
        (behind_the_end, "is truncated"),
        (shared, "two values overlap at byte"),
        (two_in_one_place, "two values have the same path"),
        (nothing, "is damaged, or has another format"),
    ],
)
def test_metadata_that_lies_is_refused_and_leaves_nothing(repository, tmp_path, change, message):
    (tmp_path / "secret").write_bytes(b"x")
    folder = written(tmp_path / "dcp")
    repickled(folder, change)
    with pytest.raises(CorruptDataError, match=message):
        import_model(repository, folder, "m")
    assert repository.names("models") == []


@pytest.mark.parametrize("more", [(), ("b",), ("b", "c"), ("new",), ("new", "c"), ("b", "new", "c", "d")])
@pytest.mark.parametrize("is_first", [True, False])
def test_no_path_leads_into_a_value_that_is_a_dict(more, is_first):
    value = {"b": {"c": 1}}
    items = {"value": value, "inner": 2}
    paths = {"value": ("a",), "inner": ("a", *more)}
    ordered = items if is_first else dict(reversed(items.items()))
    with pytest.raises(CorruptDataError, match="two values have the same path"):
        build_tree(ordered, paths, "here")
    assert value == {"b": {"c": 1}}
    assert build_tree(items, {"value": ("a",), "inner": ("x", 0, "y")}, "here") == {"a": value, "x": [{"y": 2}]}


def test_a_list_index_of_any_size_costs_nothing(repository, tmp_path):
    folder = written(tmp_path / "dcp")
    repickled(folder, huge_list)
    import_model(repository, folder, "m")
    assert torch.equal(restore(repository, "m").state["model"][1 << 60]["w"], STATE["model"]["w"])


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_in_a_data_file_is_never_imported_as_other_data(repository, tmp_path, data):
    state = {"model": {"w": torch.arange(40.0)}, "name": "abcdefgh"}
    folder = tmp_path / "dcp"
    if not folder.exists():
        written(folder, state)
        shutil.copy(folder / "__0_0.distcp", tmp_path / "whole")
        import_model(repository, folder, "whole", codec="none")
    raw = bytearray((tmp_path / "whole").read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "__0_0.distcp").write_bytes(raw)
    try:
        import_model(repository, folder, "m", codec="none")
    except CorruptDataError:
        return
    assert same(repository, "m", "whole")  # what fills the archive up


@counts_refusals(DatasvcError)
@examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_metadata_is_refused_in_our_words(repository, tmp_path, data):
    folder = tmp_path / "dcp"
    if not folder.exists():
        written(folder)
        (tmp_path / "whole").write_bytes((folder / ".metadata").read_bytes())
    raw = bytearray((tmp_path / "whole").read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (folder / ".metadata").write_bytes(raw)
    import_model(repository, folder, "m", codec="none")


def test_what_dcp_cannot_hold_and_a_full_disk_are_called_so(repository, tmp_path):
    save(repository, "m", {"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, step=0)
    with pytest.raises(ConfigError, match=r"cannot be written as DCP: .*a\.b"):
        export_model(repository, "m", tmp_path / "out", "dcp")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    (tmp_path / "full").mkdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"large|full"):
            write_dcp_folder(tmp_path / "full", {"w": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
