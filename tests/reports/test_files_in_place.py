"""Reports about reading WebDataset and Parquet files in place, by index and through a cache."""

import gzip
import io
import tarfile

import pytest

import datasvc
from datasvc.cache import Cache
from datasvc.errors import BadSampleError, SourceChangedError
from tests.samples import class_sorted, write_tars

FILES = class_sorted(12, 3)


@pytest.fixture
def repo(tmp_path):
    return datasvc.open(str(tmp_path / "repo"), create=True)


def tar_of(files, **options):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", **options) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def through_cache(repo, folder, ref="pets", budget="50MB"):
    """Return the images by key, all read through the cache of a node."""
    split = repo.datasets.open(ref)["train"]
    found = {}
    with Cache(folder, budget=budget) as cache:
        shards = cache.shards(repo.repository)
        for info in split.table.shards():
            shard = shards.open_shard(info)
            for keys, images in zip(shard.column("key").chunks, shard.column("image").chunks, strict=True):
                found |= dict(zip(keys.to_pylist(), images.to_pylist(), strict=True))
            shards.release_shard(info)
    return found


IMAGES = {name[:-4]: content for name, content in FILES.items() if name.endswith(".jpg")}


def test_tars_of_one_name_in_two_folders_are_two_files_in_the_cache(repo, tmp_path):
    """webdataset/webdataset#463: tars `xxx/0.tar` and `yyy/0.tar` overwrote each other in the cache."""
    names = list(FILES)
    for folder, part in (("xxx", names[:12]), ("yyy", names[12:])):
        write_tars(tmp_path / folder, {name: FILES[name] for name in part}, per_tar=100)
    repo.datasets.attach(f"{tmp_path}/{{xxx,yyy}}/train-000000.tar", "pets")
    assert through_cache(repo, tmp_path / "cache") == IMAGES


def test_a_compressed_file_that_was_replaced_is_not_read_from_a_stale_cache(repo, tmp_path):
    """huggingface/datasets#2956: after a local compressed file was modified, the version before was loaded."""
    path = tmp_path / "train.tar.gz"
    path.write_bytes(gzip.compress(tar_of(FILES)))
    repo.datasets.attach(str(path), "pets")
    path.write_bytes(gzip.compress(tar_of({name: FILES[name] for name in list(FILES)[:8]})))
    with pytest.raises(SourceChangedError, match=r"train\.tar\.gz has changed"):
        through_cache(repo, tmp_path / "cache")


def test_a_data_set_that_was_overwritten_at_its_url_is_another_version(repo, tmp_path):
    """Lightning-AI/litData#292: data overwritten on S3 under the same URL; a cached version was used silently."""
    source, changed = tmp_path / "wds", {**FILES, "00003.jpg": FILES["00004.jpg"]}
    repo.datasets.attach(str(write_tars(source, FILES, per_tar=8)), "pets")
    assert through_cache(repo, tmp_path / "cache") == IMAGES
    write_tars(source, changed, per_tar=8)
    repo.datasets.attach(str(source), "pets")
    assert through_cache(repo, tmp_path / "cache")["00003"] == FILES["00004.jpg"]
    assert through_cache(repo, tmp_path / "cache", "pets@1") == IMAGES  # which the cache still has


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_headers_before_a_member_do_not_shift_its_content(repo, tmp_path, form):
    """NVIDIA/DALI#4226: offsets of an index were wrong where POSIX.1-2001 headers precede a file."""
    prefix = "é" * 60 + "/" + "d" * 90 + "/"  # long, and not ASCII: an extension header for each member
    (tmp_path / "a.tar").write_bytes(tar_of({prefix + name: content for name, content in FILES.items()}, format=form))
    assert repo.datasets.attach(str(tmp_path / "a.tar"), "pets", shard_bytes=4096).num_shards["train"] > 2
    assert through_cache(repo, tmp_path / "cache") == {prefix + key: image for key, image in IMAGES.items()}


def test_members_that_are_no_samples_do_not_misalign_the_index(repo, tmp_path):
    """webdataset/webdataset#428: the index left out names without a dot, and the reader counted them."""
    files = {}
    for number, (name, content) in enumerate(FILES.items()):
        files |= (
            {f"README{number}": b"no sample", f"._{name}": b"of macOS", name: content}
            if number % 2 == 0
            else {name: content}
        )
    (tmp_path / "a.tar").write_bytes(tar_of(files))
    repo.datasets.attach(str(tmp_path / "a.tar"), "pets", shard_bytes=4096)
    assert through_cache(repo, tmp_path / "cache") == IMAGES


def test_a_tar_that_is_compressed_against_its_name(repo, tmp_path):
    """webdataset/webdataset#331: the reader by index took a compressed tar for headers, and failed in a name."""
    (tmp_path / "a.tar").write_bytes(gzip.compress(tar_of(FILES)))
    assert repo.datasets.attach(str(tmp_path / "a.tar"), "pets", shard_bytes=4096).num_shards == {"train": 1}
    assert through_cache(repo, tmp_path / "cache") == IMAGES


def test_a_full_cache_evicts_no_file_of_the_source(repo, tmp_path):
    """mosaicml/streaming#988: the limit of the cache deleted shards that existed nowhere else."""
    source = write_tars(tmp_path / "wds", FILES, per_tar=2)
    before = {path: path.read_bytes() for path in source.iterdir()}
    repo.datasets.attach(str(source), "pets")
    largest = max(info.size_bytes for info in repo.datasets.open("pets")["train"].table.shards())
    for _ in range(2):
        assert through_cache(repo, tmp_path / "cache", budget=str(4 * (largest + 8192))) == IMAGES
    assert {path: path.read_bytes() for path in source.iterdir()} == before


def test_one_key_in_several_tars_is_reported_with_its_key(repo, tmp_path):
    """webdataset/webdataset#157: each tar has one image, all of one name; reading them together failed at times."""
    for number in range(2):
        (tmp_path / f"{number}.tar").write_bytes(tar_of({"image.jpg": FILES[f"0000{number}.jpg"]}))
    with pytest.raises(BadSampleError, match="train/image: another sample of its split has this key"):
        repo.datasets.attach(f"{tmp_path}/{{0..1}}.tar", "pets")


def test_fields_in_upper_case_are_columns(repo, tmp_path):
    """huggingface/datasets#7732: a field name with upper-case characters raised a KeyError."""
    files = {name.replace(".jpg", ".Left.JPG").replace(".cls", ".CLS"): content for name, content in FILES.items()}
    (tmp_path / "a.tar").write_bytes(tar_of(files))
    repo.datasets.attach(str(tmp_path / "a.tar"), "pets")
    assert through_cache(repo, tmp_path / "cache") == IMAGES
