"""torch.distributed.checkpoint in one process; several ranks are played one after the other, by torch's planners."""

import io
import json
import math
import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from datasvc.api.gc import gc
from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError
from datasvc.models import describe_model, restore, save
from datasvc.models.dcp import DcpLoadPlanner, DcpReader, DcpWriter
from datasvc.models.dcp.metadata import CheckpointId, decode_sharding
from datasvc.models.restoring.copies import StoredCopies
from datasvc.models.tensors.state_tree import decode_state
from datasvc.models.tensors.tensor_table import read_table
from datasvc.models.versions.code_revision import CodeRevision
from datasvc.models.versions.signing import load_private_key, make_key, sign
from datasvc.repository import Repository
from datasvc.repository.objects.objects import parse_digest
from tests.examples import examples
from tests.models.as_ranks import Block, load_as_ranks, rows, save_as_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def every_kind():
    torch.manual_seed(1)
    weight = torch.randn(64, 48)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "strided": torch.randn(6, 8).t()[::2],
            "scalar": torch.tensor(3.5, dtype=torch.float64),
            "empty": torch.empty(0, 7, dtype=torch.int32),
            "half": torch.randn(5, 3).to(torch.bfloat16),
            "mask": torch.tensor([True, False, True]),
            "complex": torch.randn(3, dtype=torch.complex64).conj(),
            "parameter": torch.nn.Parameter(torch.randn(3)),
        },
        "optimizer": {
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "params": [0, 1]}],
            "pair": (torch.ones(2, 2), "a tuple is one value to planners"),
            "moments": [torch.zeros(2), torch.full((3,), math.inf)],
        },
        "$odd.name": {"nan": math.nan, "raw": b"\0\1", "text": "ümlaut", "big": 2**70, "none": None, "yes": True},
        "step": 12,
    }


def empty_like(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value.detach()).contiguous()
    if isinstance(value, dict):
        return {key: empty_like(each) for key, each in value.items()}
    if isinstance(value, list):
        return [empty_like(each) for each in value]
    return None


def assert_same(found, expected, at="state"):
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        assert torch.equal(found.detach().resolve_conj(), expected.detach().resolve_conj()), at
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), at
        for key, each in expected.items():
            assert_same(found[key], each, f"{at}.{key}")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected), at
        assert len(found) == len(expected), at
        for index, each in enumerate(expected):
            assert_same(found[index], each, f"{at}.{index}")
    else:
        assert repr(found) == repr(expected), at


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "repo")


def only_failure(caught):
    """The one error that torch gathered from the ranks."""
    ((error, _),) = caught.value.failures.values()
    return error


class CountingSource:
    """A repository's objects, in the place of a cache; counts what is read of them."""

    is_near = False  # so that all is read by `read_range`

    def __init__(self, url):
        self.objects = Repository.open(url).objects
        self.ranges = []

    def read_range(self, digest, offset, length):
        self.ranges.append((digest, offset, length))
        return self.objects.read_range(digest, offset, length)

    def __getattr__(self, name):
        return getattr(self.objects, name)

    @property
    def num_bytes(self):
        return sum(length for _, _, length in self.ranges)


@pytest.fixture(autouse=True)
def counting_sources(monkeypatch):
    """Let a `DcpReader` read from a `CountingSource` that is given as its cache."""

    def copies_of(repository, *, cache, **places):
        copies = StoredCopies(repository, cache=None if isinstance(cache, CountingSource) else cache, **places)
        if isinstance(cache, CountingSource):
            copies.open_source = lambda _records: nullcontext(cache)
        return copies

    monkeypatch.setattr("datasvc.models.dcp.reader.StoredCopies", copies_of)


# ---------------------------------------------------------------------------------------------- one rank


@pytest.mark.parametrize("codec", ["none", "delta"])
def test_every_kind_of_state_comes_back_through_torchs_planners(url, codec):
    state = every_kind()
    metadata = dcp.save(state, storage_writer=DcpWriter(url, codec=codec))
    assert metadata.storage_meta.reference == f"{url}#checkpoint@1"
    found = empty_like(state)
    dcp.load(found, storage_reader=DcpReader(url))
    assert_same(found, state)


def test_a_sharded_save_is_an_ordinary_version(url, tmp_path):
    state = every_kind()
    writer = DcpWriter(url, name="m", step=7, config={"lr": 0.1}, metrics={"loss": math.nan}, message="hello")
    dcp.save(state, storage_writer=writer)
    assert str(writer.committed) == "m@1"
    repository = Repository.open(url)
    checkpoint = restore(repository, "m")
    assert_same(checkpoint.state, state)
    entry = describe_model(repository, "m").entry
    assert (entry["step"], entry["config"], entry["metrics"]) == (7, {"lr": 0.1}, {"loss": "nan"})
    assert (entry["message"], entry["num_tensors"]) == ("hello", 12)
    assert not gc(repository, grace_s=0, no_writers=True, dry_run=False).objects, "an object that a version names"
    found = empty_like(state)
    dcp.load(found, storage_reader=DcpReader(url, ref="m@1"))
    assert_same(found, state)


def test_a_version_that_one_process_saved_whole_is_read_through_torch_too(url):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "pair": (torch.ones(2), 3)}
    save(Repository.create(url), "m", state, step=3)
    expected = {**state, "optimizer": {**state["optimizer"], "state": dict(state["optimizer"]["state"])}}
    found = empty_like(state)
    dcp.load(found, storage_reader=DcpReader(url, name="m"))
    assert_same(found, expected)


@pytest.mark.parametrize("state", [{}, {"step": 3}, {"empty": torch.empty(0, 2)}])
def test_a_state_with_hardly_anything_comes_back(url, state):
    dcp.save(state, storage_writer=DcpWriter(url))
    found = empty_like(state)
    dcp.load(found, storage_reader=DcpReader(url))
    assert_same(found, state)
    assert_same(restore(Repository.open(url), "checkpoint").state, state)


def test_the_metadata_comes_back_as_it_was(url):
    writer = DcpWriter(url)
    saved = dcp.save(every_kind(), storage_writer=writer)
    reader = DcpReader(url)
    read = reader.read_metadata()
    assert read.state_dict_metadata == saved.state_dict_metadata
    assert read.planner_data == saved.planner_data
    assert read.storage_meta == replace(saved.storage_meta, load_id=reader.load_id)
    assert saved.storage_meta.save_id == writer.save_id


@pytest.mark.parametrize("as_type", [str, Path])
def test_the_checkpoint_id_is_what_the_caller_gave_and_the_reference_names_the_version(tmp_path, as_type):
    given = as_type(tmp_path / "repo")
    saved = dcp.save({"w": torch.ones(2)}, checkpoint_id=given, storage_writer=DcpWriter("unused"))
    assert saved.storage_meta.checkpoint_id == given
    # The reference opens exactly this version, even if there is a newer one.
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=given, storage_writer=DcpWriter("unused"))
    found = {"w": torch.zeros(2)}
    dcp.load(found, checkpoint_id=saved.storage_meta.reference, storage_reader=DcpReader("unused"))
    assert found["w"].tolist() == [1, 1]
    reader = DcpReader("unused")
    reader.reset(given)
    read = reader.read_metadata().storage_meta
    assert (read.checkpoint_id, read.load_id) == (given, reader.load_id)
    assert read.reference.endswith("repo#checkpoint@2")


def test_a_new_save_or_load_has_a_new_id(url):
    writer, reader = DcpWriter(url), DcpReader(url)
    for storage, name in ((writer, "save_id"), (reader, "load_id")):
        first = getattr(storage, name)
        assert getattr(storage.storage_meta(), name) == first
        storage.reset()
        assert getattr(storage, name) != first
        assert storage.checkpoint_id == url
        storage.reset("./elsewhere#other")
        assert storage.storage_meta().checkpoint_id == "./elsewhere#other"


def test_a_planner_that_does_not_flatten_gets_its_nested_values_back(url):
    flat = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    state = {"weight": torch.ones(2), "nested": {"a": (1, 2.5), "b": [None]}}
    dcp.save(state, storage_writer=DcpWriter(url), planner=DefaultSavePlanner(**flat))
    assert_same(restore(Repository.open(url), "checkpoint").state, state)
    found = {"weight": torch.zeros(2), "nested": None}
    dcp.load(found, storage_reader=DcpReader(url), planner=DefaultLoadPlanner(**flat))
    assert_same(found, state)


def test_a_state_is_rebuilt_from_the_metadata_alone(url):
    dcp.save(every_kind(), storage_writer=DcpWriter(url))
    found = _load_state_dict_from_keys({"model", "step"}, storage_reader=DcpReader(url))
    assert_same(found, {key: every_kind()[key] for key in ("model", "step")})


def test_only_the_chunks_of_what_is_loaded_are_read(url):
    state = {"wanted": torch.randn(1000), "other": torch.randn(100_000), "step": 3}
    dcp.save(state, storage_writer=DcpWriter(url, codec="none"))
    source = CountingSource(url)
    found = {"wanted": torch.zeros(1000)}
    dcp.load(found, storage_reader=DcpReader(url, cache=source))
    assert torch.equal(found["wanted"], state["wanted"])
    assert source.num_bytes == 4000


def test_a_second_save_writes_only_what_changed(url):
    state = {"frozen": torch.randn(100_000), "trained": torch.randn(1000)}
    dcp.save(state, storage_writer=DcpWriter(url))
    before = stored_bytes(url)
    state["trained"] += 1
    dcp.save(state, storage_writer=DcpWriter(url))
    assert stored_bytes(url) - before < 15_000
    assert_same(restore(Repository.open(url), "checkpoint@2").state, state)


def test_a_changed_tensor_is_stored_as_the_difference_to_the_version_before(url):
    weight = torch.randn(200_000)
    for changed in (weight, weight * 1.001):
        dcp.save({"w": changed}, storage_writer=DcpWriter(url))
    first, second = (describe_model(Repository.open(url), f"checkpoint@{n}").entry["stored_bytes"] for n in (1, 2))
    assert second < 0.8 * first
    assert torch.equal(restore(Repository.open(url), "checkpoint@2").state["w"], weight * 1.001)


def stored_bytes(url):
    return sum(path.stat().st_size for path in Path(url, "objects").rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_repository_on_s3_is_saved_to_and_loaded_from(s3_bucket):
    url = f"{s3_bucket}/dcp"
    state = {**every_kind(), "large": torch.randn(9 << 18)}
    for _ in range(2):
        dcp.save(state, storage_writer=DcpWriter(url))
    found = empty_like(state)
    dcp.load(found, storage_reader=DcpReader(url), checkpoint_id=f"{url}#checkpoint@2")
    assert_same(found, state)


def test_plans_may_be_cached_from_save_to_save(url):
    for step in range(3):
        state = {"weight": torch.full((8,), float(step)), "step": step}
        dcp.save(state, storage_writer=DcpWriter(url), planner=DefaultSavePlanner(enable_plan_caching=True))
        assert_same(restore(Repository.open(url), "checkpoint").state, state)


def test_an_asynchronous_save_keeps_what_was_there_when_it_began(url):
    state = {"weight": torch.arange(1000.0)}
    future = dcp.async_save(state, storage_writer=DcpWriter(url))
    state["weight"].zero_()
    future.result()
    assert torch.equal(restore(Repository.open(url), "checkpoint").state["weight"], torch.arange(1000.0))


def test_a_writer_travels_to_another_process_without_what_belongs_to_a_save(url):
    writer = DcpWriter(url, name="m", step=3)
    dcp.save({"weight": torch.ones(3)}, storage_writer=writer)
    other = pickle.loads(pickle.dumps(writer))
    dcp.save({"weight": torch.ones(3)}, storage_writer=other)
    assert str(other.committed) == "m@2"
    assert describe_model(Repository.open(url), "m").entry["step"] == 3


# ---------------------------------------------------------------------------------------------- values


class Unstorable:
    pass


class Rewriting(DefaultSavePlanner):
    """Changes values on their way, and pickles them itself."""

    def transform_object(self, write_item, object):  # noqa: A002
        if write_item.type == WriteItemType.BYTE_IO and isinstance(object, int):
            object += 1  # noqa: A001
        return super().transform_object(write_item, object)


class JsonSave(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(self.lookup_object(write_item.index)).encode())
        return super().resolve_data(write_item)


class JsonLoad(dcp.LoadPlanner):
    """Understands what JsonSave wrote; for tensors it asks torch's planner."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        self.inner = DefaultLoadPlanner()
        self.inner.set_up_planner(state_dict, metadata, is_coordinator)
        self.create_local_plan = self.inner.create_local_plan
        self.create_global_plan = self.inner.create_global_plan
        self.finish_plan = self.inner.finish_plan
        self.resolve_tensor = self.inner.resolve_tensor
        self.commit_tensor = self.inner.commit_tensor

    def load_bytes(self, read_item, value):
        self.inner.original_state_dict[read_item.dest_index.fqn] = json.loads(value.read())


def test_a_value_that_needs_pickle_is_refused_by_name_and_nothing_is_visible(url):
    for planner in (None, Rewriting()):
        with pytest.raises(CheckpointException, match=r"'?extra\.thing'?.*cannot be stored without") as caught:
            dcp.save(
                {"w": torch.ones(2), "extra": {"thing": Unstorable()}}, storage_writer=DcpWriter(url), planner=planner
            )
        assert isinstance(only_failure(caught), ConfigError)
    assert Repository.open(url).names("models") == []


def test_values_that_a_planner_changes_and_pickles_itself_are_stored_without_pickle(url):
    dcp.save({"step": 1, "name": "x"}, storage_writer=DcpWriter(url), planner=Rewriting())
    assert restore(Repository.open(url), "checkpoint").state == {"step": 2, "name": "x"}


def test_a_planners_own_bytes_go_back_to_it_where_they_are_asked_for_and_never_to_one_that_would_unpickle_them(url):
    dcp.save({"w": torch.ones(2), "own": {"a": [1]}["a"]}, storage_writer=DcpWriter(url), planner=JsonSave())
    found = {"w": torch.zeros(2), "own": None}
    with pytest.raises(CheckpointException, match=r"'own' holds bytes.*planner_bytes=True"):
        dcp.load(found, storage_reader=DcpReader(url), planner=JsonLoad())
    dcp.load(found, storage_reader=DcpReader(url, planner_bytes=True), planner=JsonLoad())
    assert found["own"] == [1]
    with pytest.raises(CheckpointException, match=r"'own' holds bytes.*DefaultLoadPlanner would unpickle them"):
        dcp.load(found, storage_reader=DcpReader(url, planner_bytes=True))


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


class Wrapping(JsonLoad):
    """Hands values on to torch's planner, which unpickles them."""

    def load_bytes(self, read_item, value):
        self.inner.load_bytes(read_item, value)


class PicklingSave(DefaultSavePlanner):
    """Writes what runs a command where it is unpickled, as text, which looks like anything."""

    def resolve_data(self, write_item):
        bomb = Bomb()
        bomb.path = self.lookup_object(write_item.index)
        return io.BytesIO(pickle.dumps(bomb, protocol=0))


def test_bytes_that_a_hostile_version_calls_a_planners_own_reach_no_planner(url, tmp_path):
    target = tmp_path / "ran"
    dcp.save({"own": str(target)}, storage_writer=DcpWriter(url), planner=PicklingSave())
    with pytest.raises(CheckpointException, match="'own' holds bytes"):
        dcp.load({"own": None}, storage_reader=DcpReader(url), planner=Wrapping())
    assert not target.exists()


def test_no_stored_object_is_a_pickle(url):
    # What differs from the checked out revision is stored too, and may speak of pickles.
    dcp.save(every_kind(), storage_writer=DcpWriter(url, code=CodeRevision(None, dirty=False)))
    for path in Path(url).rglob("*"):
        if path.is_file():
            assert not path.read_bytes().startswith((b"\x80", b"PK")), path
            assert b"data.pkl" not in path.read_bytes(), path


# ---------------------------------------------------------------------------------------------- bad input


def test_a_changed_byte_is_an_error_that_names_the_tensor(url):
    dcp.save({"a": torch.randn(20_000), "b": torch.randn(20_000)}, storage_writer=DcpWriter(url, codec="none"))
    repository = Repository.open(url)
    table = {r.name: r for r in read_table(repository.objects, describe_model(repository, "checkpoint").tensors)}
    path = repository.objects.local_path(table["b"].chunks[0].chain[0].object)
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.chmod(0o644)
    path.write_bytes(raw)
    found = {"a": torch.zeros(20_000), "b": torch.zeros(20_000)}
    with pytest.raises(CheckpointException, match="tensor 'b'") as caught:
        dcp.load(found, storage_reader=DcpReader(url))
    assert isinstance(only_failure(caught), CorruptDataError)


def sharding_of(url):
    state = {"w": torch.arange(12.0).reshape(4, 3), "step": 1, "l": [{}, torch.ones(1)]}
    dcp.save(state, storage_writer=DcpWriter(url))
    repository = Repository.open(url)
    entry = describe_model(repository, "checkpoint").entry
    records = {r.name: r for r in read_table(repository.objects, parse_digest(entry["tensors"]))}
    skeleton = decode_state(repository.objects.read(parse_digest(entry["state"])), "m@1")
    return json.loads(repository.objects.read(parse_digest(entry["sharding"]))), records, skeleton


@pytest.mark.parametrize(
    "damage",
    [
        lambda it: it.pop("tensors"),
        lambda it: it.update(format="x"),
        lambda it: it.update(planner_data={"$tensor": "w"}),
        lambda it: it["tensors"].update(v=it["tensors"]["w"]),
        lambda it: it["tensors"]["w"].update(memory_format="__class__"),
        lambda it: it["tensors"]["w"].update(chunks=[]),
        lambda it: it["tensors"]["w"].update(chunks=[[[0, 0], [3, 3]]]),
        lambda it: it["tensors"]["w"].update(chunks=[[[0, 0], [4, 3]], [[0, 0], [4, 3]]]),
        lambda it: it["tensors"]["w"].update(chunks=[[[0], [12]]]),
        lambda it: it["tensors"]["w"].update(chunks=[[[0, 0], [4.0, 3]]]),
        lambda it: it["tensors"]["w"].update(chunks=[[[-4, 0], [4, 3]], [[0, 0], [4, 3]]]),
        lambda it: it["tensors"]["w"].update(chunks=7),
        lambda it: it.update(values=None),
        lambda it: it.update(planner_data=["w"]),
        lambda it: it["planner_data"].update(w=["w"]),
        lambda it: it["planner_data"].update(w={"$tuple": []}),
        lambda it: it["planner_data"].update(w={"$tuple": ["a", 20_000_000]}),
        lambda it: it["planner_data"].update(w={"$tuple": ["w", 20_000_000]}),
        lambda it: it["planner_data"].update(w={"$tuple": ["l", -1]}),
        lambda it: it["planner_data"].update(w={"$tuple": ["l", True]}),
        lambda it: it["planner_data"].update(w={"$tuple": ["l", 2]}),
        lambda it: it["planner_data"].update(w={"$tuple": ["l", 1.0]}),
    ],
)
def test_a_damaged_sharding_is_refused(url, damage):
    described, *known = sharding_of(url)
    assert decode_sharding(json.dumps(described).encode(), *known, "m@1")
    damage(described)
    with pytest.raises(CorruptDataError):
        decode_sharding(json.dumps(described).encode(), *known, "m@1")


def test_a_sharding_of_a_later_format_is_refused(url):
    described, *known = sharding_of(url)
    with pytest.raises(ConfigError, match="sharding format 2; this datasvc reads up to 1"):
        decode_sharding(json.dumps({**described, "format": 2}).encode(), *known, "m@1")
    with pytest.raises(CorruptDataError, match="is damaged"):
        decode_sharding(b"\xff", *known, "m@1")


class Noting(DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data={"w": "a note"})


def test_what_a_planner_notes_beside_paths_is_refused_when_it_is_saved(url):
    with pytest.raises(CheckpointException, match=r"'w'.*expected a path of dict keys") as caught:
        dcp.save({"w": torch.ones(2)}, storage_writer=DcpWriter(url), planner=Noting())
    assert isinstance(only_failure(caught), ConfigError)


@pytest.mark.parametrize(
    ("given_id", "url", "ref"),
    [
        ("m", None, "m"),
        ("m@3", None, "m@3"),
        ("m@prod", None, "m@prod"),
        ("./m", "./m", None),
        (Path("m"), "m", None),
        ("s3://bucket/repo", "s3://bucket/repo", None),
        ("s3://bucket/repo#m@3", "s3://bucket/repo", "m@3"),
        ("memory://a#b#m", "memory://a#b", "m"),
        ("#m", None, "m"),
    ],
)
def test_a_checkpoint_id_names_a_repository_a_model_a_version(given_id, url, ref):
    assert CheckpointId.parse(given_id) == CheckpointId(url, ref)
    assert DcpReader.validate_checkpoint_id(given_id)


def test_what_is_no_checkpoint_id_is_refused(url):
    for bad in ("", "#", "repo#Not A Name", "m@@", "m@"):
        assert not DcpWriter.validate_checkpoint_id(bad)
        with pytest.raises(ConfigError):
            CheckpointId.parse(bad)
    with pytest.raises(ConfigError, match="a save creates a new version"):
        DcpWriter(url).reset("m@3")


def test_bad_arguments_are_refused_at_once(url):
    with pytest.raises(ConfigError, match="'zip' is not a valid codec; expected one of none, planes, delta"):
        DcpWriter(url, codec="zip")
    with pytest.raises(ConfigError, match="is not a valid name of a model"):
        DcpWriter(url, name="Bad Name")
    with pytest.raises(ConfigError):
        DcpReader(url, ref="m@@")
    with pytest.raises(TypeError, match="thread_count"):
        DcpWriter(url, thread_count=2)


def test_a_missing_version_says_which_there_are(url):
    dcp.save({"w": torch.ones(2)}, storage_writer=DcpWriter(url))
    with pytest.raises(CheckpointException, match="checkpoint has no version 5; it has 1"):
        dcp.load({"w": torch.zeros(2)}, storage_reader=DcpReader(url), checkpoint_id="checkpoint@5")
    with pytest.raises(CheckpointException, match="no repository at") as caught:
        dcp.load({"w": torch.zeros(2)}, storage_reader=DcpReader(url + "2"))
    assert isinstance(only_failure(caught), NotFoundError)
    with pytest.raises(NotFoundError, match="no repository at"):
        assert DcpReader(url + "2").read_metadata().state_dict_metadata


def test_a_state_that_does_not_fit_gets_a_table_of_all_differences(url):
    saved = {"model": {"w": torch.ones(4, 3), "head": torch.ones(5), "b": torch.ones(2)}, "step": 3}
    dcp.save(saved, storage_writer=DcpWriter(url, name="net"))
    state = {"model": {"w": torch.zeros(4, 3), "head": torch.zeros(6), "bias": torch.zeros(2).half()}, "epoch": 1}

    def load(wanted, **settings):
        dcp.load(wanted, storage_reader=DcpReader(url, name="net"), planner=DcpLoadPlanner(**settings))

    with pytest.raises(CheckpointException) as caught:
        load(state)
    error = only_failure(caught)
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"{url}#net@1 does not fit the state to load, nothing was loaded: 1 tensor fits, ")
    rows = [line.split() for line in str(error).splitlines()[2:-1]]
    assert rows == [
        ["model.head", "float32", "[6]", "float32", "[5]"],
        ["epoch", "a", "value", "-"],
        ["model.bias", "float16", "[2]", "-"],
        ["model.b", "-", "float32", "[2]"],
        ["step", "-", "a", "value"],
    ]
    assert not state["model"]["w"].any()
    # A part, and another dtype, are loaded as torch's own planner does.
    part = {"model": {"w": torch.zeros(4, 3).half(), "bias": torch.zeros(2)}}
    load(part, allow_partial_load=True)
    assert torch.equal(part["model"]["w"], torch.ones(4, 3).half())
    del part["model"]["bias"]
    load(part)


def test_a_version_that_is_not_signed_is_refused_by_those_who_trust_keys(url, tmp_path):
    key = make_key(tmp_path / "key")
    for _ in range(2):
        dcp.save({"w": torch.ones(2)}, storage_writer=DcpWriter(url))
    sign(Repository.open(url), "checkpoint@1", load_private_key(tmp_path / "key"))
    for version in (1, 2):
        found = {"w": torch.zeros(2)}
        reader = DcpReader(url, ref=f"checkpoint@{version}", trusted_keys=[key.source])
        if version == 1:
            dcp.load(found, storage_reader=reader)
            assert torch.equal(found["w"], torch.ones(2))
            continue
        with pytest.raises(CheckpointException, match=r"checkpoint@2 is not trusted") as caught:
            dcp.load(found, storage_reader=reader)
        assert isinstance(only_failure(caught), CorruptDataError)
        assert not found["w"].any()


class Untransportable(Exception):  # noqa: N818
    """As those of some clients: made of two arguments, pickled with one."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Failing(DefaultSavePlanner):
    def resolve_data(self, write_item):  # noqa: ARG002
        raise Untransportable("this", "that")


def test_an_error_that_cannot_be_sent_to_other_ranks_is_told_in_words(url):
    with pytest.raises(CheckpointException, match="Untransportable: this and that") as caught:
        dcp.save({"w": torch.ones(2)}, storage_writer=DcpWriter(url), planner=Failing())
    error = only_failure(caught)
    assert type(pickle.loads(pickle.dumps(error))) is DatasvcError


# ---------------------------------------------------------------------------------------------- several ranks


def cuts(draw, size):
    """Spans as a mesh deals them: those of ranks that get nothing lie at the end."""
    points = sorted(draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else []
    return [*zip([0, *points], [*points, size], strict=True), *[(size, size)] * draw(st.integers(0, 1))]


@st.composite
def tilings(draw, shape):
    """Boxes that make up a tensor, some of them empty, as ranks of a mesh hold it."""
    boxes = [((), ())]
    for size in shape:
        boxes = [((*s, a), (*n, b - a)) for s, n in boxes for a, b in cuts(draw, size)]
    return boxes


@examples(25)
@given(st.data())
def test_what_any_ranks_save_any_other_ranks_load(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=2)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool]))
    whole = (torch.arange(math.prod(shape)) % 251).reshape(shape).to(dtype)
    url = str(tmp_path_factory.mktemp("any") / "repo")
    saved, loaded = data.draw(tilings(shape)), data.draw(tilings(shape))
    save_as_ranks(url, [{"a": {"w": Block.of(whole, box)}, "step": 3} for box in saved])
    assert_same(restore(Repository.open(url), "checkpoint").state, {"a": {"w": whole}, "step": 3})
    states = [{"a": {"w": Block.of(torch.zeros_like(whole), box)}} for box in loaded]
    load_as_ranks([DcpReader(url) for _ in states], states)
    for state, box in zip(states, loaded, strict=True):
        assert torch.equal(state["a"]["w"].as_subclass(torch.Tensor), Block.of(whole, box).as_subclass(torch.Tensor))


def test_replicas_are_written_once_and_the_work_is_spread_over_ranks(url):
    replicated = {f"layer{i}": torch.randn(20_000) for i in range(16)}
    _, results = save_as_ranks(url, [{**replicated, "step": 1} for _ in range(4)], codec="none")
    written = [sum(each.size_in_bytes for each in part) for part in results]
    assert written == [4 * 80_000] * 4
    assert [part[0].storage_data.new_bytes for part in results] == [4 * 80_000] * 4
    assert_same(restore(Repository.open(url), "checkpoint").state, {**replicated, "step": 1})


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ranks_together_read_every_byte_once_where_their_parts_follow_the_saved_ones(url, num_ranks):
    whole = torch.randn(48, 500)
    save_as_ranks(url, [{"w": rows(whole, rank, 24)} for rank in range(24)], codec="none")
    sources = [CountingSource(url) for _ in range(num_ranks)]
    states = [{"w": rows(torch.zeros(48, 500), rank, num_ranks)} for rank in range(num_ranks)]
    load_as_ranks([DcpReader(url, cache=source) for source in sources], states)
    assert torch.equal(torch.cat([state["w"].as_subclass(torch.Tensor) for state in states]), whole)
    assert [source.num_bytes for source in sources] == [whole.nbytes // num_ranks] * num_ranks


def test_a_chunk_that_only_partly_meets_a_block_is_read_whole(url):
    whole = torch.randn(8, 100)
    dcp.save({"w": whole}, storage_writer=DcpWriter(url, codec="none"))
    source = CountingSource(url)
    states = [{"w": Block.of(torch.zeros(8, 100), ((1, 10), (5, 50)))}]
    load_as_ranks([DcpReader(url, cache=source)], states)
    assert torch.equal(states[0]["w"].as_subclass(torch.Tensor), whole[1:6, 10:60])
    assert source.num_bytes == whole.nbytes


class TopAndBottom(Block):
    """A rank that holds two blocks of one tensor."""

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((1, self.whole[1]))) for row in (0, 7)]

    def __get_tensor_shard__(self, index):
        row = index.offset[0]
        return self.as_subclass(torch.Tensor)[row : row + 1]


def test_a_chunk_that_several_blocks_meet_is_read_once(url):
    whole = torch.randn(8, 30_000)
    dcp.save({"w": whole}, storage_writer=DcpWriter(url, codec="none"))
    source = CountingSource(url)
    target = Block.of(torch.zeros(8, 30_000), ((0, 0), (8, 30_000)))
    target.__class__ = TopAndBottom
    load_as_ranks([DcpReader(url, cache=source)], [{"w": target}])
    found = target.as_subclass(torch.Tensor)
    assert torch.equal(found[[0, 7]], whole[[0, 7]])
    assert not found[1:7].any()
    assert source.num_bytes == whole.nbytes


class OwnPlans(DefaultLoadPlanner):
    def create_global_plan(self, global_plan):
        return [LoadPlan(plan.items) for plan in global_plan]


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, OwnPlans])
def test_ranks_that_saw_different_newest_versions_load_the_coordinators(url, planner):
    dcp.save({"w": torch.ones(4)}, storage_writer=DcpWriter(url))
    states = [{"w": torch.zeros(4)} for _ in range(2)]

    class Late(DcpReader):
        def read_metadata(self):
            dcp.save({"w": torch.full((4,), 2.0)}, storage_writer=DcpWriter(url))
            return super().read_metadata()

    readers = [DcpReader(url), Late(url)]
    load_as_ranks(readers, states, planner)
    assert [str(reader.version) for reader in readers] == ["checkpoint@1"] * 2
    assert torch.equal(states[1]["w"], torch.ones(4))


def test_a_planner_may_make_plans_of_its_own(url):
    dcp.save({"w": torch.ones(4)}, storage_writer=DcpWriter(url))
    found = {"w": torch.zeros(4)}
    dcp.load(found, storage_reader=DcpReader(url), planner=OwnPlans())
    assert torch.equal(found["w"], torch.ones(4))


def test_parts_that_do_not_make_up_a_tensor_are_refused(url):
    whole = torch.ones(4, 2)
    with pytest.raises(ConfigError, match="leave out elements"):
        save_as_ranks(url, [{"w": rows(whole, 0, 2)}])
    assert Repository.open(url).names("models") == []


def test_two_tensors_of_one_name_are_refused(url):
    with pytest.raises(CheckpointException, match=r"two tensors of the state have the name 'a\.0'"):
        dcp.save({"a": (torch.ones(1),), "a.0": torch.ones(1)}, storage_writer=DcpWriter(url))


def test_ranks_that_hold_one_tensor_in_two_dtypes_are_refused(url):
    whole = torch.ones(4)
    with pytest.raises(ConfigError, match="tensor 'w' is float32 on one rank and float64 on"):
        save_as_ranks(url, [{"w": rows(whole, 0, 2)}, {"w": rows(whole.double(), 1, 2)}])


def test_saves_that_race_to_one_name_both_land(url):
    first, second = DcpWriter(url), DcpWriter(url)
    planner = DefaultSavePlanner()

    class Meanwhile(DefaultSavePlanner):
        def resolve_data(self, write_item):
            if first.committed is None:
                dcp.save({"w": torch.ones(4)}, storage_writer=first, planner=planner)
            return super().resolve_data(write_item)

    dcp.save({"w": torch.zeros(4)}, storage_writer=second, planner=Meanwhile())
    assert [str(first.committed), str(second.committed)] == ["checkpoint@1", "checkpoint@2"]
    assert restore(Repository.open(url), "checkpoint@1").state["w"].sum() == 4
    assert restore(Repository.open(url), "checkpoint@2").state["w"].sum() == 0
