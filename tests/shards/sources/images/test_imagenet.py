import io
import random
import tarfile

import fsspec
import pytest

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.shards.format.schema import is_image
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BATCH_BYTES, BadSample
from datasvc.shards.sources.images import imagenet as module
from datasvc.shards.sources.images.imagenet import ImageNetSource
from tests.samples import jpeg
from tests.shards.sources.source_laws import StreamedSourceLaws

TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
# In the order of the ILSVRC ids, which is not the alphabetical one.
SYNSETS = ["n02119789", "n02100735", "n01440764"]
CLASSES = ("n01440764", "n02100735", "n02119789")


def tar_of(files, **options):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as tar:
        for name, content in files:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def link(name):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return info


def train_images(synset, count=4):
    return {f"{synset}_{10 + number}.JPEG": jpeg(seed=number + int(synset[1:])) for number in range(count)}


def train_tar(synsets=SYNSETS, **options):
    return tar_of([(f"{name}.tar", tar_of(train_images(name).items(), **options)) for name in synsets], **options)


def val_name(number):
    return f"ILSVRC2012_val_{number:08d}.JPEG"


def val_tar(numbers):
    return tar_of([(val_name(number), jpeg(seed=number)) for number in numbers])


def put(url, content):
    with fsspec.open(str(url), "wb", auto_mkdir=True) as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    return str(url)


def read(source):
    """Return all samples as (split, key, image, label), and all bad ones, in the source's order."""
    samples, bad = [], []
    for part in source.parts:
        for found in source.read(part):
            if isinstance(found, BadSample):
                bad.append(found)
            else:
                assert found.schema == source.schema
                samples += [(part.split, *sample.values()) for sample in found.to_pylist()]
    return samples, bad


class TestImageNetSource(StreamedSourceLaws):
    source = ImageNetSource
    splits = ("train",)
    column, key = "key", None
    ignored = {}  # noqa: RUF012 - never changed

    def one_split(self, root):
        return root

    def write_splits(self, root, splits):
        ((_, numbers),) = splits.items()
        root.mkdir()
        files = [(f"n01440764_{number}.JPEG", jpeg(8, 8, seed=number)) for number in numbers]
        put(root / TRAIN, tar_of([("n01440764.tar", tar_of(files))]))

    def numbers(self, table):
        return [int(key.rpartition("_")[2].removesuffix(".JPEG")) for key in table.column("key").to_pylist()]


def expected_train():
    return [
        ("train", f"{name}/{file}", image, label)
        for label, name in enumerate(CLASSES)
        for file, image in train_images(name).items()
    ]


def expected_val(ids):
    return [
        ("val", val_name(number), jpeg(seed=number), CLASSES.index(SYNSETS[found - 1]))
        for number, found in enumerate(ids, 1)
    ]


def val_options(folder, ids, synsets=SYNSETS):
    return SourceOptions(
        ground_truth=put(f"{folder}/truth.txt", "".join(f"{found}\n" for found in ids)),
        synsets=put(f"{folder}/list.txt", "".join(f"{name} a word\n" for name in synsets)),
    )


@pytest.fixture
def root(tmp_path):
    return str(tmp_path)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_the_training_tar_gives_a_part_per_class_and_every_image_with_its_label(root, form):
    source = ImageNetSource.list(put(f"{root}/{TRAIN}", train_tar(format=form)))
    assert source.classes == CLASSES
    assert [part.name for part in source.parts] == [f"{TRAIN}/{name}.tar" for name in CLASSES]
    assert source.schema.names == ["key", "image", "label"]
    assert is_image(source.schema.field("image"))
    assert read(source) == (expected_train(), [])


def test_parts_can_be_read_in_any_order_and_have_their_ranges_of_bytes(root):
    url = put(f"{root}/{TRAIN}", train_tar())
    source = ImageNetSource.list(url)
    with fsspec.open(url, "rb") as file:
        whole = file.read()
    for part in reversed(source.parts):
        start, stop = part.where["offset"], part.where["offset"] + part.where["length"]
        synset = part.name.rpartition("/")[2].removesuffix(".tar")
        assert whole[start:stop] == tar_of(train_images(synset).items())
        assert sum(batch.num_rows for batch in source.read(part)) == 4


def test_only_headers_are_read_to_list_the_training_tar(tmp_path, monkeypatch):
    big = tar_of([("n01440764_1.JPEG", bytes(1 << 20))])
    url = put(f"memory://{tmp_path}/{TRAIN}", tar_of([(f"n{number:08d}.tar", big) for number in range(20)]))
    lengths, real = [], FileReader.read_range

    def counted(self, path, offset, length):
        lengths.append(length)
        return real(self, path, offset, length)

    monkeypatch.setattr(FileReader, "read_range", counted)
    assert len(ImageNetSource.list(url).parts) == 20
    assert sum(lengths) < 20 * 1024 + 2 * 10240
    assert len(lengths) < 20 * 2 + 5


def test_the_validation_tar_is_labelled_by_ground_truth_and_synsets(root):
    ids = [3, 1, 1, 2, 3]
    source = ImageNetSource.list(put(f"{root}/{VAL}", val_tar(range(1, 6))), val_options(root, ids))
    assert source.classes == CLASSES
    assert [(part.split, part.num_samples) for part in source.parts] == [("val", 5)]
    assert read(source) == (expected_val(ids), [])


@pytest.mark.parametrize("store", ["", "memory://"])
def test_a_folder_with_both_tars_and_the_devkit_is_both_splits(tmp_path, store):
    root = f"{store}{tmp_path}"
    ids = [2, 3, 1]
    put(f"{root}/{TRAIN}", train_tar())
    put(f"{root}/{VAL}", val_tar(range(1, 4)))
    put(f"{root}/ILSVRC2012_devkit_t12/data/{GROUND_TRUTH}", "\r\n".join(map(str, ids)))
    put(f"{root}/synsets.txt", "\ufeff" + "\n".join(SYNSETS) + "\n\n")
    put(f"{root}/n01440764/unpacked.JPEG", jpeg())
    source = ImageNetSource.list(root)
    assert source.classes == CLASSES
    assert read(source) == (expected_train() + expected_val(ids), [])
    assert read(ImageNetSource.list(f"{root}/{VAL}"))[0] == expected_val(ids)


def test_the_order_of_images_in_the_validation_tar_does_not_matter(tmp_path):
    ids, numbers = [1, 2, 3, 3, 2, 1, 1], list(range(1, 8))
    random.Random(4).shuffle(numbers)
    source = ImageNetSource.list(put(tmp_path / VAL, val_tar(numbers)), val_options(tmp_path, ids))
    assert sorted(read(source)[0]) == expected_val(ids)


def test_the_fingerprint_changes_with_the_ground_truth(tmp_path):
    url = put(tmp_path / VAL, val_tar(range(1, 3)))
    before = ImageNetSource.list(url, val_options(tmp_path, [1, 2])).fingerprint()
    assert ImageNetSource.list(url, val_options(tmp_path, [1, 2])).fingerprint() == before
    assert ImageNetSource.list(url, val_options(tmp_path, [2, 2])).fingerprint() != before


def test_a_validation_tar_without_labels_says_what_to_give(root):
    url = put(f"{root}/{VAL}", val_tar([1]))
    with pytest.raises(NotFoundError, match=r"--synsets.*meta\.mat.*scipy"):
        ImageNetSource.list(url)
    put(f"{root}/synset_words.txt", "\n".join(SYNSETS))
    with pytest.raises(NotFoundError, match=f"--ground-truth, the devkit's {GROUND_TRUTH}"):
        ImageNetSource.list(url)


def test_a_binary_ground_truth_says_which_file_it_is(tmp_path):
    url = put(tmp_path / VAL, val_tar([1]))
    put(tmp_path / "synset_words.txt", "\n".join(SYNSETS))
    options = SourceOptions(ground_truth=put(tmp_path / "meta.mat", b"MATLAB\xff\xfe\0"))
    with pytest.raises(
        ConfigError, match=f"not a text file.*give --ground-truth, the devkit's {GROUND_TRUTH}"
    ) as error:
        ImageNetSource.list(url, options)
    assert "scipy" not in str(error.value)


def test_a_binary_synset_list_says_how_to_make_a_text(tmp_path):
    url = put(tmp_path / VAL, val_tar([1]))
    options = SourceOptions(
        synsets=put(tmp_path / "meta.mat", b"MATLAB\xff\xfe\0"), ground_truth=str(tmp_path / "gt")
    )
    with pytest.raises(ConfigError, match=r"not a text file.*scipy"):
        ImageNetSource.list(url, options)


@pytest.mark.parametrize(
    ("ids", "synsets", "says"),
    [
        ([1, 4], SYNSETS, "line 2 of the ground truth is the id 4, but the synset list has 3 lines"),
        ([0], SYNSETS, "line 1 of the ground truth is the id 0"),
        (["n01440764"], SYNSETS, "line 1 of .*truth.txt is 'n01440764'; expected one ILSVRC id"),
        ([1, "", 1], SYNSETS, "line 2 of .* is ''"),
        ([], SYNSETS, "truth.txt is empty"),
        ([1], ["n02119789", "tench"], "line 2 of .*list.txt starts with 'tench'"),
        ([1], ["n02119789", "n01440764", "n02119789"], "has n02119789 twice, in lines 1 and 3"),
        ([1], [], "list.txt is empty"),
    ],
)
def test_nonsense_in_ground_truth_or_synsets_is_named_by_its_numbers(ids, synsets, says, tmp_path):
    url = put(tmp_path / VAL, val_tar([1]))
    with pytest.raises(ConfigError, match=says):
        ImageNetSource.list(url, val_options(tmp_path, ids, synsets))


def test_a_list_in_alphabetical_order_is_refused_for_it_would_label_every_image_wrongly(tmp_path):
    url = put(tmp_path / VAL, val_tar([1]))
    names = [f"n{number:08d}" for number in range(1000)]
    with pytest.raises(ConfigError, match="every label would be wrong"):
        ImageNetSource.list(url, val_options(tmp_path, [1], names))
    devkit = names[::-1]
    source = ImageNetSource.list(url, val_options(tmp_path, [1], [*devkit, "n09999999"]))  # an inner node follows
    assert source.classes == tuple(names)
    assert source.val_labels == (999,)


def test_a_synset_list_of_other_classes_than_the_training_tar_is_refused(tmp_path):
    put(tmp_path / TRAIN, train_tar(SYNSETS[:2]))
    put(tmp_path / VAL, val_tar([1]))
    with pytest.raises(
        ConfigError, match="list has 3 classes, the training tar 2; 1 are in only one of them, such as n01440764"
    ):
        ImageNetSource.list(str(tmp_path), val_options(tmp_path, [1]))


def test_more_images_than_ground_truth_is_an_error_and_fewer_are_reported(tmp_path):
    url = put(tmp_path / VAL, val_tar([1, 2, 3]))
    with pytest.raises(ConfigError, match="is validation image 3, but the ground truth has 2 lines"):
        read(ImageNetSource.list(url, val_options(tmp_path, [1, 2])))
    samples, bad = read(ImageNetSource.list(url, val_options(tmp_path, [1, 2, 3, 1])))
    assert len(samples) == 3
    assert [(found.key, found.reason) for found in bad] == [(VAL, "holds 3 images, but the ground truth has 4 lines")]


def test_bad_members_of_a_class_tar_are_named_and_the_others_kept(tmp_path):
    png = b"\x89PNG\r\n\x1a\n in a JPEG's name"
    files = [
        (link("n01440764_2.JPEG"), b""),
        ("n01440764_1.JPEG", png),
        ("notes.txt", b""),
        ("._n01440764_1.JPEG", b"?"),
        ("../3.JPEG", b""),
    ]
    samples, bad = read(ImageNetSource.list(put(tmp_path / TRAIN, tar_of([("n01440764.tar", tar_of(files))]))))
    assert samples == [("train", "n01440764/n01440764_1.JPEG", png, 0)]
    assert [found.key for found in bad] == ["n01440764/n01440764_2.JPEG", "n01440764/notes.txt", "n01440764/3.JPEG"]
    assert [word in found.reason for word, found in zip(["link", "no image", "leads out"], bad, strict=True)] == [
        True
    ] * 3


def test_an_image_larger_than_the_limit_is_bad_and_never_held(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_MEMBER_BYTES", 1000)
    files = [("n01440764_1.JPEG", bytes(1001)), ("n01440764_2.JPEG", bytes(1000))]
    samples, bad = read(ImageNetSource.list(put(tmp_path / TRAIN, tar_of([("n01440764.tar", tar_of(files))]))))
    assert [sample[1] for sample in samples] == ["n01440764/n01440764_2.JPEG"]
    assert ["1001 bytes; expected at most 1000" in found.reason for found in bad] == [True]


def test_a_validation_image_without_a_number_is_bad(tmp_path):
    url = put(tmp_path / VAL, tar_of([(val_name(1), jpeg()), ("cat.JPEG", jpeg()), (val_name(0), jpeg())]))
    samples, bad = read(ImageNetSource.list(url, val_options(tmp_path, [1, 1, 1])))
    assert len(samples) == 1
    assert [found.key for found in bad] == ["cat.JPEG", val_name(0)]


def test_a_broken_class_tar_ends_its_part_and_no_other(tmp_path):
    cut = tar_of(train_images("n02100735").items())[:3000]
    files = [("n01440764.tar", tar_of(train_images("n01440764").items())), ("n02100735.tar", cut)]
    files += [("n02119789.tar", tar_of(train_images("n02119789").items()))]
    samples, bad = read(ImageNetSource.list(put(tmp_path / TRAIN, tar_of(files))))
    assert [found.key for found in bad] == [f"{TRAIN}/n02100735.tar"]
    assert "truncated" in bad[0].reason
    whole = [sample for sample in expected_train() if "n02100735" not in sample[1]]
    assert [sample for sample in samples if "n02100735" not in sample[1]] == whole
    assert [sample[1] for sample in samples if "n02100735" in sample[1]] == [
        "n02100735/n02100735_10.JPEG",
        "n02100735/n02100735_11.JPEG",
    ]


@pytest.mark.parametrize(
    ("files", "error", "says"),
    [
        ([("cats.tar", b"")], ConfigError, "cats.tar is not named after a synset"),
        ([("n01440764.tar", b""), ("x/n01440764.tar", b"")], ConfigError, "has the class n01440764 twice"),
        ([(link("n01440764.tar"), b"")], ConfigError, "n01440764.tar is a symbolic link"),
        ([("README.md", b"")], CorruptDataError, "starts with 'README.md'; expected a class tar"),
        ([], CorruptDataError, "starts with 'nothing'"),
    ],
)
def test_what_is_no_tar_of_imagenet_is_refused(files, error, says, tmp_path):
    with pytest.raises(error, match=says):
        ImageNetSource.list(put(tmp_path / TRAIN, tar_of(files)))


def test_other_files_in_the_training_tar_are_counted(tmp_path):
    files = [("n01440764.tar", tar_of([])), ("README.md", b""), ("LICENSE", b""), ("._n01440764.tar", b"")]
    assert dict(ImageNetSource.list(put(tmp_path / TRAIN, tar_of(files))).ignored) == {
        ".md": 1,
        "(none)": 1,
        ".tar": 1,
    }


def test_what_is_not_there_is_not_found(tmp_path):
    with pytest.raises(NotFoundError, match=f"expected {TRAIN} or {VAL}"):
        ImageNetSource.list(str(tmp_path))
    with pytest.raises(NotFoundError):
        ImageNetSource.list(str(tmp_path / TRAIN))


def test_batches_hold_at_most_a_mebibyte_or_one_image(tmp_path):
    sizes = [400_000] * 5 + [2 * BATCH_BYTES, 10]
    files = [(f"n01440764_{number}.JPEG", bytes(size)) for number, size in enumerate(sizes)]
    source = ImageNetSource.list(put(tmp_path / TRAIN, tar_of([("n01440764.tar", tar_of(files))])))
    batches = list(source.read(source.parts[0]))
    assert sum(batch.num_rows for batch in batches) == len(sizes)
    for batch in batches:
        assert batch.num_rows == 1 or sum(map(len, batch["image"].to_pylist())) <= BATCH_BYTES
