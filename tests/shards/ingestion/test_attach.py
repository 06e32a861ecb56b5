"""Attached versions: shards are built from the files of a source, and are those that an ingest stores."""

import os
import secrets
import shutil
import tempfile

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import datasvc
from datasvc.cache import Cache
from datasvc.errors import BadSampleError, ConfigError, NotFoundError, SourceChangedError, UnavailableError
from datasvc.repository.objects import in_place
from datasvc.shards.ingestion import attach
from datasvc.shards.sources.common.listing import stat_file
from tests.samples import class_sorted, write_folder, write_tars

FILES = class_sorted(24, 3)


@pytest.fixture
def repo(tmp_path):
    return datasvc.open(str(tmp_path / "repo"), create=True)


@pytest.fixture
def tars(tmp_path):
    return write_tars(tmp_path / "wds", FILES, per_tar=16)


def samples(repo, ref, split="train"):
    opened = repo.datasets.open(ref)[split]
    return [opened[number] for number in range(len(opened))]


def change(path):
    """Change the last byte of an image, and keep size and modification time."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[content.index(b"\xff\xd9") - 1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_samples_are_those_of_an_ingest_in_the_order_of_the_source(repo, tars):
    report = repo.datasets.attach(str(tars / "train-{000000..000002}.tar"), "pets", shard_bytes=1 << 30)
    repo.datasets.ingest(str(tars), "copied", keep_order=True)
    assert report.num_shards == {"train": 3}
    assert samples(repo, "pets") == samples(repo, "copied")
    diff = repo.datasets.diff("pets", "copied")
    assert {name: split.unchanged for name, split in diff.splits.items()} == {"train": 24}


@pytest.mark.parametrize("min_bytes", [8 << 20, 100])  # of blobs with digests of parts
def test_one_tar_is_the_shard_that_an_ingest_stores_and_the_repository_has_none(
    repo, tmp_path, monkeypatch, min_bytes
):
    for module in ("parts", "writer"):
        monkeypatch.setattr(f"datasvc.shards.format.{module}.MIN_PARTED_BYTES", min_bytes)
    source = str(write_tars(tmp_path / "one", FILES, per_tar=1000))
    attached = repo.datasets.open(str(repo.datasets.attach(source, "pets").version))["train"]
    objects = repo.repository.objects
    assert not objects.local_path(attached.table.shard(0).digest).exists()
    stored = repo.datasets.open(str(repo.datasets.ingest(source, "copied", keep_order=True).version))["train"]
    assert attached.digest == stored.digest


def test_a_large_tar_is_cut_at_samples_and_a_compressed_one_is_not(repo, tmp_path):
    folder = write_tars(tmp_path / "wds", FILES, per_tar=1000)
    report = repo.datasets.attach(str(folder), "pets", shard_bytes=4096)
    assert report.num_shards["train"] > 3
    repo.datasets.ingest(str(folder), "copied", keep_order=True)
    assert samples(repo, "pets") == samples(repo, "copied")


def test_parquet_with_nested_columns_and_labels_in_folder_names(repo, tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / "data" / f"class={label}").mkdir(parents=True)
        boxes = [{"x": [number, 2], "name": label} for number in range(50)]
        table = pa.table({"boxes": boxes, "text": [f"{label} {number}" for number in range(50)]})
        pq.write_table(table, tmp_path / "data" / f"class={label}" / "0.parquet", row_group_size=10)
    report = repo.datasets.attach(str(tmp_path / "data"), "pets", shard_bytes=1)
    repo.datasets.ingest(str(tmp_path / "data"), "copied", keep_order=True)
    assert report.num_shards == {"train": 2}
    assert samples(repo, "pets") == samples(repo, "copied")


def test_held_out_samples_are_those_of_an_ingest(repo, tars):
    for name, make in (("pets", repo.datasets.attach), ("copied", repo.datasets.ingest)):
        make(str(tars), name, val_fraction=0.3, **({"keep_order": True} if name == "copied" else {}))
    for split in ("train", "val"):
        assert samples(repo, "pets", split) == samples(repo, "copied", split)


def test_changed_bytes_are_named_and_nothing_of_them_is_served(repo, tars, tmp_path):
    repo.datasets.attach(str(tars), "pets")
    split = repo.datasets.open("pets")["train"]
    first = split[0]
    change(tars / "train-000001.tar")
    assert split[0] == first
    with pytest.raises(SourceChangedError, match=r"train-000001\.tar has changed .* its bytes differ"):
        split[8]
    with Cache(tmp_path / "cache", budget="50MB") as cache:
        with pytest.raises(SourceChangedError, match=r"train-000001\.tar has changed"):
            cache.stage([split])
        assert not cache.is_resident(split.table.shard(1))
    assert [problem.kind for problem in repo.datasets.verify("pets", deep=True).problems] == ["changed"]


def test_a_file_of_another_size_and_one_that_is_gone_are_named(repo, tars):
    repo.datasets.attach(str(tars), "pets")
    (tars / "train-000000.tar").unlink()
    with (tars / "train-000001.tar").open("ab") as file:
        file.write(bytes(512))
    split = repo.datasets.open("pets")["train"]
    with pytest.raises(NotFoundError, match=r"train-000000\.tar does not exist, and an attached shard"):
        split[0]
    with pytest.raises(SourceChangedError, match=r"train-000001\.tar has changed .* bytes, and had"):
        split[8]
    assert [problem.kind for problem in repo.datasets.verify("pets").problems] == ["missing", "changed"]


def test_a_file_that_was_moved_is_found_after_it_is_attached_again(repo, tars, tmp_path):
    repo.datasets.attach(str(tars), "pets")
    tars.rename(tmp_path / "moved")
    with pytest.raises(NotFoundError):
        samples(repo, "pets@1")
    repo.datasets.attach(str(tmp_path / "moved"), "pets")
    assert samples(repo, "pets@1") == samples(repo, "pets@2")


@pytest.mark.parametrize(
    "source", ["wds/../wds/train-{000000..000002}.tar", "wds//train-{000000..000002}.tar", "file://{}?.tar"]
)
def test_files_are_found_from_another_folder_however_they_were_named(repo, tars, tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        repo.datasets.attach(source.format(tars / "train-00000") if source.startswith("f") else source, "pets")
    monkeypatch.chdir("/")
    assert len(samples(repo, "pets")) == 24
    # The second attach stored no other recipes.
    assert len(list((tmp_path / "repo" / in_place.IN_PLACE).rglob("*.json"))) == 3


def test_of_two_files_of_one_size_the_one_as_it_was_attached_is_read(repo, tars, tmp_path):
    repo.datasets.attach(str(tars), "pets")
    for folder in ("a", "z"):  # either order of the recipes
        shutil.copytree(tars, tmp_path / folder, copy_function=shutil.copy)
        repo.datasets.attach(str(tmp_path / folder), "pets")
    for folder in (tars, tmp_path / "a"):
        change(folder / "train-000000.tar")
        os.utime(folder / "train-000000.tar")
    assert len(samples(repo, "pets@1")) == 24


def test_a_place_that_does_not_respond_hides_no_other_place(repo, tars, tmp_path, monkeypatch):
    def stat(file_system, path, location):
        if not location.startswith(str(tmp_path / "z")):
            raise UnavailableError(f"{location} does not respond")
        return stat_file(file_system, path, location)

    repo.datasets.attach(str(tars), "pets")
    for folder in ("a", "z"):
        shutil.copytree(tars, tmp_path / folder, copy_function=shutil.copy)
        repo.datasets.attach(str(tmp_path / folder), "pets")
    monkeypatch.setattr(attach, "stat_file", stat)
    assert len(samples(repo, "pets@1")) == 24
    shutil.rmtree(tmp_path / "z")
    with pytest.raises(UnavailableError, match="does not respond"):
        samples(repo, "pets@1")


def test_a_process_that_is_killed_while_it_builds_leaves_no_file(repo, tars, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    seen, build = [], in_place._build[0]

    def look(*arguments):
        build(*arguments)
        seen.append(os.listdir(tempfile.tempdir))

    monkeypatch.setattr(in_place, "_build", [look])
    repo.datasets.attach(str(tars), "pets")
    assert len(samples(repo, "pets")) == 24
    assert seen == [[]] * 3


def test_another_release_that_writes_other_bytes_is_not_taken_for_a_change(repo, tars, monkeypatch):
    monkeypatch.setattr("datasvc.shards.ingestion.recipes.made_by", lambda: "datasvc 9 with Arrow 9")
    repo.datasets.attach(str(tars), "pets")
    monkeypatch.undo()
    assert len(samples(repo, "pets")) == 24
    change(tars / "train-000000.tar")
    with pytest.raises(SourceChangedError, match="than datasvc 9 with Arrow 9, which attached it"):
        samples(repo, "pets")


@pytest.mark.parametrize(("damage", "reason"), [("cut", "truncated"), ("twice", "key"), ("alone", "has no image")])
def test_bad_input_is_refused_as_an_ingest_refuses_it(repo, tmp_path, damage, reason):
    folder = write_tars(tmp_path / "wds", FILES, per_tar=16)
    if damage == "cut":
        os.truncate(folder / "train-000001.tar", 3000)
    if damage == "alone":
        write_tars(folder, {**dict(list(FILES.items())[:15]), "x.cls": b"1"}, per_tar=17)
    if damage == "twice":
        (folder / "train-000009.tar").write_bytes((folder / "train-000000.tar").read_bytes())
    for make in (repo.datasets.attach, repo.datasets.ingest):
        with pytest.raises(BadSampleError, match=reason):
            make(str(folder), "pets")
    report = repo.datasets.attach(str(folder), "pets", on_bad="skip")
    assert len(samples(repo, "pets")) == report.num_samples["train"]


def test_other_formats_and_urls_with_credentials_are_refused(repo, tmp_path):
    write_folder(tmp_path / "photos", {"train": {"cat": 2}})
    with pytest.raises(ConfigError, match="only WebDataset tars and Parquet files can be attached"):
        repo.datasets.attach(str(tmp_path / "photos"), "pets")


def test_derived_versions_gc_and_a_push_which_copies_the_bytes(repo, tars, tmp_path):
    repo.datasets.attach(str(tars), "pets")
    repo.datasets.delete("pets", keys=["00003"])
    repo.datasets.attach(
        str(write_tars(tmp_path / "more", {"x.jpg": FILES["00001.jpg"], "x.cls": b"2"}, per_tar=9)),
        "pets",
        append=True,
    )
    assert [sample["key"] for sample in samples(repo, "pets")][-1] == "x"
    assert not repo.datasets.verify("pets").problems
    recipes = list((tmp_path / "repo" / in_place.IN_PLACE).rglob("*.json"))
    assert not repo.gc(grace_s=0, no_writers=True, dry_run=False).recipes
    target = datasvc.open(str(tmp_path / "target"), create=True)
    repo.datasets.push(target.repository, ["pets"])
    (tars / "train-000000.tar").unlink()
    assert len(samples(target, "pets")) == 24
    repo.datasets.remove(["pets@1", "pets@2", "pets@3"], force=True)
    assert len(repo.gc(grace_s=0, no_writers=True, dry_run=False).recipes) == len(recipes)


def test_a_purge_lists_the_files_and_builds_no_purged_sample_again(repo, tars):
    repo.datasets.attach(str(tars), "pets")
    digest = repo.datasets.open("pets")["train"].table.shard(0).digest
    report = repo.datasets.purge("pets", keys=["00003"], dry_run=False)
    assert [(copy.kind, copy.destination, number) for copy, number in report.destinations] == [
        ("in place", str(tars), 1)
    ]
    assert in_place.read_recipes(repo.repository.storage, digest) == []
    assert samples(repo, "pets")[3]["image"] == b""


def test_an_interrupted_attach_continues(repo, tars, monkeypatch):
    built = []
    store = in_place.store_recipe

    def store_two(storage, digest, recipe):
        if len(built) == 2:
            raise NotFoundError("stop")
        built.append(digest)
        store(storage, digest, recipe)

    monkeypatch.setattr("datasvc.shards.ingestion.build.store_recipe", store_two)
    with pytest.raises(NotFoundError, match="stop"):
        repo.datasets.attach(str(tars), "pets")
    monkeypatch.undo()
    assert repo.datasets.attach(str(tars), "pets").num_resumed == 2
    assert len(samples(repo, "pets")) == 24


@pytest.mark.slow
def test_files_of_a_bucket_are_read_by_the_cache_and_a_new_object_is_named(repo, tars, s3_bucket, tmp_path):
    root = f"{s3_bucket}/{secrets.token_hex(4)}"
    store, _ = fsspec.url_to_fs(root)
    store.put(str(tars), root, recursive=True)
    repo.datasets.attach(f"{root}/train-{{000000..000002}}.tar", "pets", shard_bytes=8192)
    repo.datasets.ingest(str(tars), "copied", keep_order=True)
    split = repo.datasets.open("pets")["train"]
    with Cache(tmp_path / "cache", budget="50MB") as cache:
        staged = cache.stage([split])
        assert (staged.num_from_origin, cache.stage([split]).num_hits) == (split.table.num_shards,) * 2
    assert samples(repo, "pets") == samples(repo, "copied")
    store.pipe_file(f"{root}/train-000001.tar", (tars / "train-000002.tar").read_bytes())
    with pytest.raises(SourceChangedError, match=r"s3://.*train-000001\.tar has changed"):
        samples(repo, "pets")


@pytest.mark.slow
def test_a_loader_gives_the_batches_of_an_ingested_version_and_resumes(repo, tars, tmp_path):
    from datasvc.loaders import ImageLoader

    repo.datasets.attach(str(tars), "pets")
    repo.datasets.ingest(str(tars), "copied", keep_order=True)

    def batches(name, state=None, **options):
        split = repo.datasets.open(name)["train"]
        with ImageLoader(split, batch_size=4, size=16, seed=0, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for batch in loader:
                yield batch.images.numpy().tobytes(), batch.labels.tolist(), loader.state_dict()

    def content(found):
        return [each[:2] for each in found]

    stored = content(batches("copied", training=False))
    with Cache(tmp_path / "cache", budget="50MB") as cache:
        assert content(batches("pets", training=False, cache=cache)) == stored
        shuffled = list(batches("pets", training=True, cache=cache))
        assert content(batches("pets", shuffled[2][2], training=True, cache=cache)) == content(shuffled[3:])
    assert content(batches("pets", training=True)) == content(shuffled)
