"""Tables, states and shardings that are larger than any that is written: neither written nor read."""

import os
import tracemalloc
from functools import partial

import pyarrow as pa
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from datasvc.api.gc import gc
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models import restore, save
from datasvc.models.dcp import DcpReader, DcpWriter, metadata
from datasvc.models.interop import export_model
from datasvc.models.registry.diff import diff
from datasvc.models.registry.registry import describe_model
from datasvc.models.registry.verify import every_version, verify
from datasvc.models.restoring.load_into_module import load_version_into
from datasvc.models.restoring.restore import restore as restore_through
from datasvc.models.tensors import state_tree, tensor_table
from datasvc.models.tensors.tensor_table import decode_table
from datasvc.models.transfer import transfer
from datasvc.models.versions import entry_fields
from datasvc.repository import Repository
from datasvc.repository.objects.objects import digest_of
from tests.models.as_ranks import load_as_ranks
from tests.models.entries import commit_entry
from tests.models.every_kind import save_every_kind

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

MAX_MEMORY = 16 << 20


@pytest.fixture
def tracing():
    tracemalloc.start()
    yield
    tracemalloc.stop()


def name_large_object(repository, role):
    """Commit `m@3`, of which one object is a terabyte of nothing; returns its name."""
    save_every_kind(repository)
    entry = describe_model(repository, "m@2").entry
    digest = digest_of(role.encode())
    path = repository.objects.local_path(digest)
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, 1 << 40)
    fields = {"tensors": entry["tensors"], "state": entry["state"], role: digest}
    if role == "diff":
        fields = {"code": {"revision": None, "dirty": True, "diff": digest}}
    return commit_entry(repository, "m", **fields)


def load_sharded(repository, ref):
    load_as_ranks([DcpReader(repository.url, ref=ref)], [{"step": None}])


def export_safetensors(folder, repository, ref):
    export_model(repository, ref, str(folder), "safetensors")


USES = {
    "restore": restore,
    "restore through copies": lambda repository, ref: restore_through(repository, ref, fallback=[repository]),
    "load sharded": load_sharded,
    "load into": lambda repository, ref: load_version_into(repository, torch.nn.Linear(1, 1), ref),
    "diff": lambda repository, ref: diff(repository, ref, "m@1"),
    "gc": lambda repository, _ref: gc(repository),
}


def raises_within_memory(use, match):
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    with pytest.raises(CorruptDataError, match=match):
        use()
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before < MAX_MEMORY


@pytest.mark.parametrize("use", USES)
def test_a_table_that_is_too_large_is_not_read(repository, use, tracing):
    ref = name_large_object(repository, "tensors")
    raises_within_memory(
        partial(USES[use], repository, ref), f"has more than the {tensor_table.MAX_TABLE_BYTES} bytes"
    )


@pytest.mark.parametrize("use", ["restore", "restore through copies", "load sharded"])
def test_a_state_that_is_too_large_is_not_read(repository, use, tracing):
    ref = name_large_object(repository, "state")
    raises_within_memory(partial(USES[use], repository, ref), f"has more than the {state_tree.MAX_STATE_BYTES} bytes")


def test_a_sharding_that_is_too_large_is_not_read(repository, tracing):
    ref = name_large_object(repository, "sharding")
    most = entry_fields.MAX_SHARDING_BYTES
    raises_within_memory(partial(load_sharded, repository, ref), f"has more than the {most} bytes")


def test_exports_and_transfers_read_nothing_that_is_too_large(repository, tmp_path, tracing):
    other = Repository.create(str(tmp_path / "other"))
    for number, role in enumerate(("tensors", "state")):
        ref = name_large_object(repository, role)
        folder = tmp_path / f"export{number}"
        raises_within_memory(partial(export_safetensors, folder, repository, ref), "has more than the")
        assert not folder.exists()
    raises_within_memory(partial(transfer, repository, other, ["m@3"]), "has more than the")


@pytest.mark.parametrize("role", ["tensors", "state", "sharding", "diff"])
def test_verify_tells_of_what_is_too_large_and_looks_at_the_rest(repository, role, tracing):
    name_large_object(repository, role)
    tracemalloc.reset_peak()
    (problem,) = verify(repository, every_version(repository)).problems
    assert (problem.kind, problem.hit) == ("changed", {"m@3": ()})
    assert "has more than the" in problem.detail
    assert tracemalloc.get_traced_memory()[1] < 4 * MAX_MEMORY


def test_a_table_of_senseless_rows_takes_little_more_memory_than_itself(tracing):
    rows = 300_000
    table = pa.table(
        [
            pa.array(["a"] * rows), pa.array(["uint8"] * rows),
            pa.array([[]] * rows, tensor_table._COLUMNS.field("shape").type),
            pa.array([[]] * rows, tensor_table._COLUMNS.field("pieces").type),
        ],
        schema=tensor_table._COLUMNS,
    )  # fmt: skip
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, tensor_table._COLUMNS) as file:
        file.write_table(table)
    raw = sink.getvalue().to_pybytes()
    raises_within_memory(partial(decode_table, raw, "here"), "here: tensor 'a'|not sorted")


def test_a_table_of_too_many_tensors_is_neither_written_nor_read(repository, monkeypatch):
    state = {"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}
    save(repository, "m", state, step=0)
    monkeypatch.setattr(tensor_table, "MAX_TENSORS", 2)
    with pytest.raises(CorruptDataError, match="3 tensors; the limit is 2"):
        restore(repository, "m")
    with pytest.raises(ConfigError, match="the table of 3 tensors"):
        save(repository, "n", state, step=0)


def test_what_nobody_would_read_again_is_not_written(repository, monkeypatch):
    monkeypatch.setattr(state_tree, "MAX_STATE_BYTES", 100)
    with pytest.raises(ConfigError, match=r"without its tensors takes .* Store long lists"):
        save(repository, "m", {"text": "x" * 101}, step=0)
    monkeypatch.setattr(tensor_table, "MAX_TABLE_BYTES", 1000)
    with pytest.raises(ConfigError, match="the limits are 1048576 tensors and 1000 bytes"):
        save(repository, "m", {"w": torch.ones(3)}, step=0)
    monkeypatch.undo()
    monkeypatch.setattr(metadata, "MAX_SHARDING_BYTES", 100)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(3)}, storage_writer=DcpWriter(repository.url))
    assert "the sharding of this save, a list of the blocks of each tensor" in str(caught.value)
    assert repository.names("models") == []
