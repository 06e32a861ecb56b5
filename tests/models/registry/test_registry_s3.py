"""The registry on a real S3 server: the life of a model from its first save to the collection of what was removed."""

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from datasvc.api.gc import GRACE_S, gc_at
from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.models import (
    CodeRevision,
    ConsumptionTracker,
    describe_model,
    find_consumers,
    list_models,
    model_log,
    read_lineage,
    save,
)
from datasvc.models.registry.diff import diff
from datasvc.models.registry.retention import RetentionPolicy, remove, retain
from datasvc.models.registry.verify import every_version, verify
from datasvc.models.restoring.restore import restore
from datasvc.models.search import find_versions
from datasvc.models.search.index import INDEX_PATH, decode_index
from datasvc.models.transfer import transfer
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from tests.loaders.numbered import Numbers, sample_of
from tests.models.entries import commit_entry
from tests.models.every_kind import equal, links_of, state_of
from tests.shards.written_versions import LABELLED_SCHEMA

pytestmark = pytest.mark.slow

NO_CODE = CodeRevision(None, dirty=False)


@pytest.fixture
def url(s3_bucket):
    return f"{s3_bucket}/{secrets.token_hex(8)}"


@pytest.fixture
def remote(url):
    return Repository.create(url)


def save_versions(repository, number, name="net", **about):
    for step in range(number):
        parent = f"{name}@{step}" if step else None
        save(
            repository, name, state_of(step), step=step, metrics={"top1": step % 3}, config={"lr": 0.1 * (step + 1)},
            parent=parent, code=NO_CODE, environment={}, **about,
        )  # fmt: skip


def found(repository, condition):
    return [str(version) for version in find_versions(repository, condition)]


def test_versions_are_saved_told_compared_and_restored(url, remote):
    save_versions(remote, 3)
    again = Repository.open(url)
    assert [(str(each), each.parents, each.entry["step"]) for each in model_log(again, "net")] == [
        ("net@1", (), 0), ("net@2", ("net@1",), 1), ("net@3", ("net@2",), 2),
    ]  # fmt: skip
    assert [str(each) for each in list_models(again)] == ["net@3"]
    assert describe_model(again, "net").entry["config"] == {"lr": pytest.approx(0.3)}
    with pytest.raises(NotFoundError, match="net has no version 9; it has 1 to 3"):
        restore(again, "net@9")
    compared = diff(again, "net@1", "net@3")
    assert compared.tensors.changed == ("model.weight",)
    assert compared.tensors.num_equal == 5
    assert compared.values["metrics"].changed == {"top1": (0, 2)}
    (change,) = compared.tensors.changes
    difference = state_of(2)["model"]["weight"] - state_of(0)["model"]["weight"]
    assert change.norm == pytest.approx(difference.norm().item(), rel=1e-3)
    for number in range(3):
        done = restore(again, f"net@{number + 1}")
        assert equal(done.state, state_of(number))
        assert done.report.came_bytes.keys() == {"direct"}
    assert verify(again, every_version(again), deep=True).problems == ()
    (link, *_) = links_of(again, "net@3")
    content = again.objects.read(link.object)
    again.storage.put_bytes(again.objects.path(link.object), content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptDataError, match="do not match"):
        restore(again, "net@3")
    again.storage.put_bytes(again.objects.path(link.object), content)


def test_of_rivals_that_move_a_tag_from_where_both_saw_it_one_wins(url, remote):
    save_versions(remote, 3)
    remote.tag("models", "net@1", "prod")
    rivals, start = [Repository.open(url) for _ in range(2)], Barrier(2)

    def move(rival, number):
        start.wait()
        try:
            return rival.tag("models", f"net@{number}", "prod", expect=1).version
        except ConflictError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        won, lost = sorted(pool.map(move, rivals, (2, 3)), key=lambda told: isinstance(told, ConflictError))
    assert isinstance(lost, ConflictError)
    assert won in {2, 3}
    assert remote.tags("models", "net") == {"prod": won}
    assert remote.resolve("models", "net@prod~1").version == 1
    assert [move.content["version"] for move in remote.tag_history("models", "net", "prod")] == [1, won]
    remote.untag("models", "net", "prod", expect=won)
    with pytest.raises(NotFoundError):
        remote.resolve("models", "net@prod")


def test_saves_that_race_to_one_name_both_land(url, remote):
    save_versions(remote, 1)
    rivals, start = [Repository.open(url) for _ in range(2)], Barrier(2)

    def store(rival, step):
        start.wait()
        return save(rival, "net", state_of(step), step=step, code=NO_CODE, environment={})

    with ThreadPoolExecutor(2) as pool:
        landed = list(pool.map(store, rivals, (1, 2)))
    assert {each.version for each in landed} == {2, 3}
    for step, version in zip((1, 2), landed, strict=True):
        assert equal(restore(remote, str(version)).state, state_of(step))


def test_what_meets_a_condition_is_found_without_an_index_with_one_and_with_one_that_is_stale(remote):
    for step in range(33):
        commit_entry(remote, "net", step=step, metrics={"top1": step / 100})
    assert remote.storage.size(INDEX_PATH) is None
    assert found(remote, "metrics.top1 > 0.305") == ["net@33", "net@32"]
    index = remote.storage.read(INDEX_PATH)
    commit_entry(remote, "net", step=33, metrics={"top1": 0.4})
    commit_entry(remote, "other", step=1, metrics={"top1": 0.5})
    assert remote.storage.read(INDEX_PATH) == index
    assert found(remote, "metrics.top1 > 0.315") == ["net@34", "net@33", "other@1"]
    remote.tag("models", "net@34", "prod")
    remove(remote, ["net@33"])
    assert found(remote, "metrics.top1 > 0.315") == ["net@34", "other@1"]
    assert found(remote, "'prod' in tags") == ["net@34"]
    remote.storage.put_bytes(INDEX_PATH, index[:100])
    assert found(remote, "step = 33") == ["net@34"]
    assert decode_index(remote.storage.read(INDEX_PATH)).table.num_rows == 35


def test_who_saw_a_sample_and_what_a_version_came_from_is_told(remote):
    samples = [sample_of(number, LABELLED_SCHEMA) for number in range(20)]
    ingest(remote, samples, "numbers", shard_bytes=100)
    split = open_dataset(remote, "numbers@1")["train"]
    loader = Numbers(split, 4, tail="drop", prefetch=0)
    reading, batches = ConsumptionTracker(loader), iter(loader)
    _, served = next(batches)
    save(remote, "net", state_of(0), step=1, data=[reading.use()], code=NO_CODE, environment={})
    told = find_consumers(remote, keys=[str(number) for number in range(20)])
    (version,) = told.versions
    assert (version.name, version.num_samples, version.is_complete) == ("net@1", 4, True)
    assert {(int(each.key), each.epoch, each.step) for each in told.all_uses()} == {(n, 0, 1) for n in served}
    lineage = read_lineage(remote, "net@1")
    assert list(lineage.datasets) == ["numbers@1"]
    assert lineage.shards == {split.digest: [shard.digest for shard in split.table.shards()]}
    assert lineage.gaps == []


def test_what_is_removed_or_not_retained_goes_with_gc_and_nothing_else_does(remote):
    save_versions(remote, 5)
    remote.tag("models", "net@1", "first")
    with pytest.raises(ConfigError, match="net@1 is net@first"):
        remove(remote, ["net@1"])
    assert [str(each) for each in remove(remote, ["net@2"], message="wrong data").versions] == ["net@2"]
    with pytest.raises(NotFoundError, match=r"net@2 was removed.*wrong data"):
        restore(remote, "net@2")
    policy = RetentionPolicy(last=1, best=1, metric="top1")
    _, planned = retain(remote, "net", policy)
    assert planned.removed == (4,)
    retain(remote, "net", policy, dry_run=False)
    kept = {1: 0, 3: 2, 5: 4}
    later = time.time() + GRACE_S + 60
    before = {info.digest for info in gc_at(remote, later).objects}
    swept = gc_at(remote, later, dry_run=False)
    assert {info.digest for info in swept.objects} == before != set()
    assert gc_at(remote, later).objects == ()
    for number, step in kept.items():
        assert equal(restore(remote, f"net@{number}").state, state_of(step))
    assert verify(remote, every_version(remote), deep=True).problems == ()
    log = model_log(remote, "net")
    assert [each.version for each in log if each.removed] == [2, 4]


def test_versions_go_to_a_local_repository_and_come_back_as_themselves(remote, repository):
    save_versions(repository, 3)
    pushed = transfer(repository, remote, ["net@3"], with_parents=True)
    assert [(str(each.target), each.is_new) for each in pushed.versions] == [(f"net@{n}", True) for n in (1, 2, 3)]
    assert transfer(repository, remote, ["net@3"], with_parents=True).num_objects == 0
    save(remote, "net", state_of(3), step=3, parent="net@3", code=NO_CODE, environment={})
    pulled = transfer(remote, repository, ["net@4"], with_parents=True)
    assert [str(each.target) for each in pulled.versions if each.is_new] == ["net@4"]
    for place in (repository, remote):
        assert describe_model(place, "net@4").entry["parent"] == "net@3"
        for number in range(4):
            assert equal(restore(place, f"net@{number + 1}").state, state_of(number))
    for link in links_of(remote, "net@4"):
        remote.storage.put_bytes(remote.objects.path(link.object), b"damaged")
    done = restore(remote, "net@4", fallback=[repository])
    assert equal(done.state, state_of(3))
    assert {bad.digest for bad in done.report.bad_copies} == {link.object for link in links_of(remote, "net@4")}
