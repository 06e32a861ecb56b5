"""Sources of images with boxes: COCO, YOLO and Pascal VOC give the same boxes of the same pictures."""

import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from datasvc.errors import BadSampleError, ConfigError, NotFoundError
from datasvc.loaders import DataRanks, ImageLoader, ObjectConfig
from datasvc.loaders.augment.objects import View, draw_masks
from datasvc.shards import ingest, open_dataset
from datasvc.shards.export.exporter import export
from datasvc.shards.format.schema import BOX_CLASSES
from datasvc.shards.images.run_lengths import decode_runs, encode_runs, scale_runs
from datasvc.shards.sources.choose import choose_format, open_source
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.images.coco import CocoSource
from datasvc.shards.sources.images.voc import VocSource
from datasvc.shards.sources.images.yolo import YoloSource
from tests.shards.sources.source_laws import ListedSourceLaws

WIDTH, HEIGHT = 60, 40
NAMES = ["cat", "dog"]
BOXES = [[6.0, 4.0, 30.0, 20.0], [33.0, 10.0, 60.0, 40.0]]


def photo(number=0, size=(WIDTH, HEIGHT), orientation=None):
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), np.uint8)
    buffer, exif = io.BytesIO(), Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    Image.fromarray(pixels).save(buffer, "jpeg", exif=exif)
    return buffer.getvalue()


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def write_coco(root, split, numbers, **changes):
    for number in numbers:
        put(root / split / f"{number:03d}.jpg", photo(number))
    entries = [{"id": n, "file_name": f"{n:03d}.jpg", "width": WIDTH, "height": HEIGHT} for n in numbers]
    annotations = [
        {"id": 10 * n + k, "image_id": n, "category_id": 7 + 9 * k, "bbox": [x, y, r - x, b - y]}
        | {"iscrowd": k, "area": 9.5}
        for n in numbers
        for k, (x, y, r, b) in enumerate(BOXES)
    ]
    categories = [{"id": 16, "name": "dog"}, {"id": 7, "name": "cat"}]
    document = {"images": entries, "annotations": annotations, "categories": categories, **changes}
    put(root / "annotations" / f"instances_{split}.json", json.dumps(document))


def write_yolo(root, split, numbers):
    put(root / "data.yaml", json.dumps({"names": dict(enumerate(NAMES))}).replace('"0"', "0").replace('"1"', "1"))
    lines = [
        f"{k} {(x + r) / 2 / WIDTH} {(y + b) / 2 / HEIGHT} {(r - x) / WIDTH} {(b - y) / HEIGHT}"
        for k, (x, y, r, b) in enumerate(BOXES)
    ]
    for number in numbers:
        put(root / "images" / split / f"{number:03d}.jpg", photo(number))
        put(root / "labels" / split / f"{number:03d}.txt", "\n".join(lines))


def voc_xml(size=(WIDTH, HEIGHT), head=""):
    objects = "".join(
        f"<object><name>{name}</name><difficult>{k}</difficult><bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin>"
        f"<xmax>{r}</xmax><ymax>{b}</ymax></bndbox></object>"
        for k, (name, (x, y, r, b)) in enumerate(zip(NAMES, BOXES, strict=True))
    )
    return f"{head}<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>{objects}</annotation>"


def write_voc(root, split, numbers):
    for number in numbers:
        put(root / "JPEGImages" / f"{number:03d}.jpg", photo(number))
        put(root / "Annotations" / f"{number:03d}.xml", voc_xml())
    put(root / "ImageSets" / "Main" / f"{split}.txt", "\n".join(f"{number:03d}" for number in numbers))


WRITERS = {"coco": write_coco, "yolo": write_yolo, "voc": write_voc}


class AnnotatedLaws(ListedSourceLaws):
    def write_splits(self, root, splits):
        for split, numbers in splits.items():
            WRITERS[self.source.kind](root, split, numbers)

    def one_split(self, root):
        return root


class TestCoco(AnnotatedLaws):
    source = CocoSource


class TestYolo(AnnotatedLaws):
    source = YoloSource


class TestVoc(AnnotatedLaws):
    source = VocSource


def ingested(repository, root, kind, name="boxes", **options):
    ingest(repository, str(root), name, source_options=SourceOptions(format=kind), **options)
    return open_dataset(repository, name)


@pytest.mark.parametrize("kind", WRITERS)
def test_boxes_are_stored_in_one_form(repository, tmp_path, kind):
    WRITERS[kind](tmp_path / "source", "train", range(3))
    split = ingested(repository, tmp_path / "source", kind)["train"]
    assert json.loads(split.table.sample_schema.metadata[BOX_CLASSES]) == NAMES
    assert sorted(sample["key"] for sample in split) == ["000.jpg", "001.jpg", "002.jpg"]
    for sample in split:
        np.testing.assert_allclose(sample["boxes"], BOXES, atol=1e-9)
        assert sample["box_labels"] == [0, 1]
    extra = {"coco": "box_crowd", "voc": "box_difficult"}.get(kind)
    assert extra is None or split[0][extra] == [False, True]


def test_boxes_follow_images_that_the_ingest_makes_smaller(repository, tmp_path):
    for kind, write in WRITERS.items():
        write(tmp_path / kind, "train", range(1))
        sample = ingested(repository, tmp_path / kind, kind, kind, max_side=30)["train"][0]
        assert (sample["width"], sample["height"]) == (30, 20)
        np.testing.assert_allclose(sample["boxes"], np.array(BOXES) / 2, atol=1e-9)


def test_keypoints_and_areas_follow_images_that_the_ingest_makes_smaller(repository, tmp_path):
    keypoints = [20.0, 10.0, 2.0, 0.0, 0.0, 0.0]
    annotation = {"id": 1, "image_id": 0, "category_id": 7, "bbox": [6, 4, 24, 16], "area": 100}
    write_coco(
        tmp_path / "source",
        "train",
        range(2),
        categories=[{"id": 7, "name": "cat", "keypoints": ["left", "right"]}],
        annotations=[{**annotation, "keypoints": keypoints}, {**annotation, "id": 2, "image_id": 1}],
    )
    split = ingested(repository, tmp_path / "source", "coco", max_side=30)["train"]
    found = {sample["key"]: (sample["keypoints"], sample["box_area"]) for sample in split}
    assert found["000.jpg"] == ([[10.0, 5.0, 2.0, 0.0, 0.0, 0.0]], [25.0])


def test_the_files_of_coco_as_distributed_list_each_image_once(repository, tmp_path):
    for name in ("train2017", "val2017"):
        write_coco(tmp_path / "source", name, range(2) if name == "train2017" else range(2, 4))
        instances = json.loads((tmp_path / "source" / "annotations" / f"instances_{name}.json").read_text())
        captions = {**instances, "annotations": [{"id": 1, "image_id": 0, "caption": "a cat"}]}
        for other, document in (("captions", captions), ("person_keypoints", instances)):
            put(tmp_path / "source" / "annotations" / f"{other}_{name}.json", json.dumps(document))
        put(tmp_path / "source" / f"more_{name}.json", json.dumps(captions))
    put(tmp_path / "source" / "notes.json", json.dumps({"annotations": []}))
    dataset = ingested(repository, tmp_path / "source", None)
    assert {name: sorted(sample["key"] for sample in split) for name, split in dataset.items()} == {
        "train": ["000.jpg", "001.jpg"],
        "val": ["002.jpg", "003.jpg"],
    }
    put(tmp_path / "source" / "again_val2017.json", json.dumps(instances))
    with pytest.raises(ConfigError, match=r"002.jpg is listed twice .*move one"):
        open_source(str(tmp_path / "source"), SourceOptions(format="coco"))


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["train/cat/a.jpg", "labels/train.txt"], "image-folder"),
        (["labels/a.jpg", "labels/a.txt", "images/b.jpg"], "image-folder"),
        (["cat/a.jpg", "Annotations/readme.xml"], "image-folder"),
        (["cat/a.jpg", "annotations/classes.json"], "image-folder"),
        (["cat/a.jpg", "annotations/instances_train.json"], "coco"),
        (["JPEGImages/a.jpg", "Annotations/a.xml"], "voc"),
        (["train/images/a.jpg", "train/labels/a.txt"], "yolo"),
        (["images/train/a.jpg", "labels/train/a.txt"], "yolo"),
    ],
)
def test_a_folder_is_annotated_only_if_a_file_belongs_to_an_image(tmp_path, names, kind):
    for name in names:
        put(tmp_path / name, b"")
    assert choose_format(str(tmp_path), SourceOptions()) == kind


def test_annotations_are_found_before_many_images(tmp_path, monkeypatch):
    monkeypatch.setattr("datasvc.shards.sources.choose._MAX_SCANNED_FILES", 2)
    for folder in "abcxyz":  # file systems list folders in any order
        for number in range(2):
            put(tmp_path / folder / f"{number}.jpg", b"")
    put(tmp_path / "annotations" / "instances_a.json", b"")
    assert choose_format(str(tmp_path), SourceOptions()) == "coco"


def test_an_export_as_coco_is_read_by_pycocotools_and_by_another_ingest(repository, tmp_path):
    coco = pytest.importorskip("pycocotools.coco")
    write_coco(tmp_path / "source", "train", range(4))
    write_coco(tmp_path / "source", "val", range(4, 6))
    first = ingested(repository, tmp_path / "source", "coco")
    export(repository, "boxes", str(tmp_path / "out"), "coco")
    read = coco.COCO(str(tmp_path / "out" / "annotations" / "instances_train.json"))
    assert len(read.getImgIds()) == 4
    assert [each["name"] for each in read.loadCats(read.getCatIds())] == NAMES
    boxes = [each["bbox"] for each in read.loadAnns(read.getAnnIds(imgIds=[1]))]
    assert boxes == [[6.0, 4.0, 24.0, 16.0], [33.0, 10.0, 27.0, 30.0]]
    second = ingested(repository, tmp_path / "out", "coco", "again")
    for name, split in first.items():
        expected = {sample["key"]: dict(sample) for sample in split}
        assert {sample["key"]: dict(sample) for sample in second[name]} == expected


def test_polygons_are_stored_scaled_exported_and_drawn_as_pycocotools_draws_them(repository, tmp_path):
    coco = pytest.importorskip("pycocotools.coco")
    polygons = [
        [[6.0, 4.0, 30.0, 4.0, 24.0, 20.0]],
        [[33.0, 10.0, 60.0, 12.0, 40.0, 40.0], [1.0, 30.0, 9.0, 30.0, 9.0, 38.0]],
    ]
    run_lengths = {"counts": [41, 9, WIDTH * HEIGHT - 50], "size": [HEIGHT, WIDTH]}
    written = [
        [*polygons[0], [1.0, 1.0, 5.0, 5.0]],
        polygons[1],
        run_lengths,
        polygons[0][0],
    ]  # a flat list is one polygon
    annotations = [
        {"id": 10 * n + k, "image_id": n, "category_id": 7, "bbox": [2, 2, 55, 36], "segmentation": segmentation}
        for n in range(2)
        for k, segmentation in enumerate(written)
    ]
    write_coco(tmp_path / "source", "train", range(2), annotations=annotations)
    split = ingested(repository, tmp_path / "source", "coco")["train"]
    assert split[0]["polygons"] == [*polygons, [], polygons[0]]
    small = ingested(repository, tmp_path / "source", "coco", "small", max_side=30)["train"]
    np.testing.assert_allclose(small[0]["polygons"][0], np.array(polygons[0]) / 2)
    export(repository, "boxes", str(tmp_path / "out"), "coco")
    read = coco.COCO(str(tmp_path / "out" / "annotations" / "instances_train.json"))
    found = read.loadAnns(read.getAnnIds(imgIds=[1]))
    view = View(np.array([0.0, 0.0, WIDTH, WIDTH]), flip=False, width=WIDTH, height=HEIGHT, shown=(WIDTH, WIDTH))
    for annotation, mask in zip(found[:2], draw_masks(polygons, view)[1], strict=True):
        assert (read.annToMask(annotation) != mask[:HEIGHT]).mean() < 0.02
    assert found[2]["segmentation"] == run_lengths


def blobs(seed):
    """Return a mask of some ellipses, `bool[HEIGHT, WIDTH]`."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    found = np.zeros((HEIGHT, WIDTH), np.bool_)
    for left, top, radius in random.uniform([0, 0, 2], [WIDTH, HEIGHT, 20], (5, 3)):
        found ^= (x - left) ** 2 + (y - top) ** 2 < radius**2
    return found


def test_run_lengths_of_both_forms_are_those_of_pycocotools(repository, tmp_path):
    coco, mask = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.mask")
    expected, annotations = [], []
    for number in range(12):
        expected.append([np.ones((HEIGHT, WIDTH), np.bool_) if number == 0 else blobs(number), blobs(100 + number)])
        compressed = mask.encode(np.asfortranarray(expected[-1][0].astype(np.uint8)))
        texts = {"size": [HEIGHT, WIDTH], "counts": compressed["counts"].decode()}
        written = [texts, {"size": [HEIGHT, WIDTH], "counts": encode_runs(expected[-1][1])}]
        ids = {"image_id": number, "category_id": 7, "bbox": [0, 0, WIDTH, HEIGHT], "iscrowd": 1}
        annotations += [{"id": 2 * number + k, "segmentation": each, **ids} for k, each in enumerate(written)]
    write_coco(tmp_path / "source", "train", range(12), annotations=annotations)
    split = ingested(repository, tmp_path / "source", "coco")["train"]
    stored = {sample["key"]: (sample["polygons"], sample["mask_runs"][0]) for sample in split}
    assert stored["000.jpg"] == ([[], []], [0, WIDTH * HEIGHT])
    layers = {"boxes": "boxes", "polygons": "polygons", "objects": ObjectConfig(columns=("box_crowd",))}
    options = {"batch_size": 4, "ranks": DataRanks(), "size": None, "training": True, **layers}
    with ImageLoader(split, **options) as loader:
        for batch in loader:
            for index, target in enumerate(batch.targets):
                stored = np.stack(expected[int(batch.keys[index][:3])])
                shown = stored[:, :, ::-1] if batch.flips[index] else stored
                assert np.array_equal(target["masks"].numpy(), shown)
                assert target["box_crowd"].tolist() == [True, True]
    export(repository, "boxes", str(tmp_path / "out"), "coco")
    read = coco.COCO(str(tmp_path / "out" / "annotations" / "instances_train.json"))
    for image in read.loadImgs(read.getImgIds()):
        found = [read.annToMask(each) for each in read.loadAnns(read.getAnnIds(imgIds=[image["id"]]))]
        assert np.array_equal(found, expected[int(image["file_name"][-7:-4])])


def test_run_lengths_follow_a_smaller_image(repository, tmp_path):
    runs = {"size": [HEIGHT, WIDTH], "counts": encode_runs(blobs(0))}
    annotations = [{"id": 1, "image_id": 0, "category_id": 7, "bbox": [0, 0, 9, 9], "segmentation": runs}]
    write_coco(tmp_path / "source", "train", range(1), annotations=annotations)
    (sample,) = ingested(repository, tmp_path / "source", "coco", max_side=WIDTH // 2)["train"]
    found = decode_runs(sample["mask_runs"][0], WIDTH // 2, HEIGHT // 2)
    assert np.array_equal(found, blobs(0)[1::2, 1::2])


@pytest.mark.parametrize("shape", [(23, 9), (3, 31), (1, 1), (40, 40)])
def test_run_lengths_of_another_size_are_those_of_the_nearest_pixels(shape):
    mask = np.random.default_rng(0).random((11, 17)) < 0.5
    rows, columns = (
        np.floor((np.arange(to) + 0.5) * of / to).astype(int) for to, of in zip(shape, (11, 17), strict=True)
    )
    scaled = scale_runs(encode_runs(mask), 17, 11, shape[1], shape[0])
    assert np.array_equal(decode_runs(scaled, shape[1], shape[0]), mask[rows[:, None], columns])


def test_run_lengths_that_are_not_those_of_the_image_are_bad_samples_in_the_loader(repository):
    sample = {"key": "a", "image": photo(), "boxes": BOXES, "polygons": [[[1.0, 1.0, 9.0, 1.0, 9.0, 9.0]], []]}
    ingest(repository, [{**sample, "mask_runs": [[], [10, 20]]}], "runs")
    split, layers = open_dataset(repository, "runs")["train"], {"boxes": "boxes", "polygons": "polygons"}
    with (
        ImageLoader(split, batch_size=1, training=False, ranks=DataRanks(), **layers) as loader,
        pytest.raises(BadSampleError, match="run lengths have 30 pixels, and its image 60x40"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("value", ["5 3", 5, ["", "5 3"]])
def test_a_column_of_another_type_with_the_name_of_run_lengths_is_none(repository, value):
    sample = {"key": "a", "image": photo(), "boxes": BOXES, "polygons": [[[1.0, 1.0, 9.0, 1.0, 9.0, 9.0]], []]}
    ingest(repository, [{**sample, "mask_runs": value}], "own")
    split, layers = open_dataset(repository, "own")["train"], {"boxes": "boxes", "polygons": "polygons"}
    with ImageLoader(split, batch_size=1, training=False, ranks=DataRanks(), **layers) as loader:
        assert next(iter(loader)).objects["numbers"].tolist() == [0]


def test_polygons_of_yolo_are_stored_with_their_boxes(repository, tmp_path):
    write_yolo(tmp_path / "source", "train", range(2))
    put(tmp_path / "source" / "labels/train/000.txt", "1 0.1 0.1 0.5 0.1 0.5 0.5\n0 0.5 0.5 0.2 0.2\n")
    samples = {sample["key"]: sample for sample in ingested(repository, tmp_path / "source", "yolo")["train"]}
    outline = [0.1 * WIDTH, 0.1 * HEIGHT, 0.5 * WIDTH, 0.1 * HEIGHT, 0.5 * WIDTH, 0.5 * HEIGHT]
    np.testing.assert_allclose(samples["000.jpg"]["polygons"][0], [outline])
    assert samples["000.jpg"]["polygons"][1] == []
    np.testing.assert_allclose(samples["000.jpg"]["boxes"][0], [outline[0], outline[1], outline[2], outline[5]])
    assert samples["001.jpg"]["polygons"] == [[], []]


def test_an_export_names_keypoints_that_only_some_samples_have(repository, tmp_path):
    samples = [
        {"key": str(n), "image": photo(n), "boxes": [BOXES[0]], "box_labels": [0]}
        | {"keypoints": [[1.0, 2.0, 2.0]] if n == 3 else None}
        for n in range(6)
    ]
    ingest(repository, samples, "some")
    export(repository, "some", str(tmp_path / "out"), "coco")
    document = json.loads((tmp_path / "out" / "annotations" / "instances_train.json").read_text())
    assert [category["keypoints"] for category in document["categories"]] == [["0"]]


def test_other_classes_are_not_appended(repository, tmp_path):
    write_coco(tmp_path / "one", "train", range(2))
    write_coco(
        tmp_path / "two", "train", range(2, 4), categories=[{"id": 7, "name": "cow"}, {"id": 16, "name": "dog"}]
    )
    write_coco(tmp_path / "three", "train", range(4, 6))
    ingested(repository, tmp_path / "one", "coco")
    with pytest.raises(ConfigError, match=r"classes.*'cat'.*'cow'"):
        ingested(repository, tmp_path / "two", "coco", append=True)
    assert len(ingested(repository, tmp_path / "three", "coco", append=True)["train"]) == 4


def reasons(repository, root, kind):
    report = ingest(repository, str(root), "bad", on_bad="skip", source_options=SourceOptions(format=kind))
    return [bad.reason for bad in report.bad]


BOMB = '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;">]>'
COCO_IMAGE = {"id": 0, "file_name": "000.jpg", "width": WIDTH, "height": HEIGHT}
HUGE_IMAGE = {**COCO_IMAGE, "width": WIDTH * 10**9, "height": HEIGHT * 10**9}
GOOD_IMAGE = {**COCO_IMAGE, "id": 1, "file_name": "001.jpg"}
ONE = {"id": 1, "image_id": 0, "category_id": 7}


@pytest.mark.parametrize(
    ("kind", "path", "content", "reason"),
    [
        ("voc", "Annotations/000.xml", voc_xml(head=BOMB), "document type"),
        ("voc", "Annotations/000.xml", voc_xml(size=(HEIGHT, WIDTH)), "for 40x60"),
        ("voc", "Annotations/000.xml", "<annotation>" * 100_000, "cannot be read"),
        ("voc", "Annotations/000.xml", voc_xml().replace(">6.0<", ">nan<").replace(">7.0<", ">nan<"), "not finite"),
        ("yolo", "labels/train/000.txt", "0 30 20 10 10", "in pixels"),
        ("yolo", "labels/train/000.txt", "2 0.5 0.5 0.1 0.1", "class 2 of 2"),
        ("yolo", "labels/train/000.txt", "1 0.1 0.1 nan 0.5 0.5 0.5", "polygon of its annotation is not finite"),
        ("yolo", "labels/train/000.txt", b"0 0.5 0.5 0.1 \xff", "expected class x y w h"),
        ("yolo", "images/train/000.jpg", b"", "empty"),
    ],
)
def test_bad_annotations_make_bad_samples(repository, tmp_path, kind, path, content, reason):
    WRITERS[kind](tmp_path / "source", "train", range(3))
    put(tmp_path / "source" / path, content)
    (found,) = reasons(repository, tmp_path / "source", kind)
    assert reason in found


def bad_runs(size, counts):
    return {"annotations": [{**ONE, "bbox": [1, 2, 3, 4], "segmentation": {"size": size, "counts": counts}}]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"annotations": [{**ONE, "bbox": [1, 2, 3]}]}, "no valid bbox"),
        ({"annotations": [{**ONE, "bbox": [1, 2, 1e999, 3]}]}, "not finite"),
        ({"annotations": [{**ONE, "bbox": [1, 2, 3, 4], "segmentation": [[1, 2, 3]]}]}, "polygons or run lengths"),
        (bad_runs([HEIGHT, WIDTH], [5, 5]), "run lengths"),
        (bad_runs([HEIGHT, WIDTH], [-5, WIDTH * HEIGHT + 5]), "run lengths"),
        (bad_runs([WIDTH, HEIGHT], [WIDTH * HEIGHT]), "run lengths"),
        (bad_runs([-HEIGHT, -WIDTH], [WIDTH * HEIGHT]), "run lengths"),
        (bad_runs([0, 0], []), "run lengths"),
        (
            {"images": [HUGE_IMAGE, GOOD_IMAGE], **bad_runs([HEIGHT * 10**9, WIDTH * 10**9], [24 * 10**20])},
            "run lengths",
        ),
        (bad_runs([HEIGHT, WIDTH], "P"), "run lengths"),
        (bad_runs([HEIGHT, WIDTH], "o" * 30 + "0"), "run lengths"),
        (bad_runs([HEIGHT, WIDTH], "é"), "run lengths"),
        (bad_runs(None, []), "run lengths"),
        (
            {"annotations": [{**ONE, "bbox": [1, 2, 3, 4], "segmentation": [[1, 1e999] * 3]}]},
            "polygon of its annotation",
        ),
        ({"annotations": [{**ONE, "bbox": [1, 2, 3, 4], "category_id": 99}]}, "no valid bbox, category"),
        (
            {"images": [{**COCO_IMAGE, "width": HEIGHT, "height": WIDTH}, GOOD_IMAGE], "annotations": []},
            "turned the picture",
        ),
        ({"images": [{"id": 0, "file_name": "000.jpg"}, GOOD_IMAGE], "annotations": []}, "width and height"),
    ],
)
def test_bad_entries_of_coco_make_bad_samples(repository, tmp_path, changes, reason):
    write_coco(tmp_path / "source", "train", range(3), **({"images": [COCO_IMAGE, GOOD_IMAGE]} | changes))
    write_coco(tmp_path / "source", "val", range(3, 4))
    (found,) = reasons(repository, tmp_path / "source", "coco")
    assert reason in found


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"categories": [{"id": 7}]}, ConfigError, "category without a name"),
        ({"images": [{**COCO_IMAGE, "file_name": "../../secret.jpg"}]}, ConfigError, "below the source"),
        ({"images": [{**COCO_IMAGE, "file_name": "gone.jpg"}]}, NotFoundError, "1 image of 1.*gone.jpg"),
        ({"images": [COCO_IMAGE, COCO_IMAGE]}, ConfigError, "twice"),
        ({"images": {}}, ConfigError, "no valid list 'images'"),
    ],
)
def test_damaged_files_of_coco_are_refused(tmp_path, changes, error, message):
    write_coco(tmp_path, "train", range(2), **changes)
    with pytest.raises(error, match=message):
        open_source(str(tmp_path), SourceOptions(format="coco"))


def test_missing_files_of_annotations_are_named(tmp_path):
    put(tmp_path / "images" / "a.jpg", photo())
    for kind, message in (("coco", "JSON file"), ("voc", "XML file"), ("yolo", "names of classes")):
        with pytest.raises(NotFoundError, match=message):
            open_source(str(tmp_path), SourceOptions(format=kind))
    put(tmp_path / "classes.txt", "cat\n")
    with pytest.raises(NotFoundError, match=re.escape("labels/NAME.txt")):
        open_source(str(tmp_path), SourceOptions(format="yolo"))


def test_aliases_in_a_yaml_file_are_refused(tmp_path):
    write_yolo(tmp_path, "train", range(1))
    put(tmp_path / "data.yaml", "a: &a [x, x]\nnames: [*a, *a]\n")
    with pytest.raises(ConfigError, match="aliases"):
        open_source(str(tmp_path), SourceOptions(format="yolo"))


def test_a_turned_photo_has_the_boxes_of_the_upright_one(repository, tmp_path):
    write_yolo(tmp_path / "source", "train", range(1))
    put(tmp_path / "source" / "images" / "train" / "000.jpg", photo(size=(HEIGHT, WIDTH), orientation=6))
    sample = ingested(repository, tmp_path / "source", "yolo")["train"][0]
    assert (sample["width"], sample["height"]) == (WIDTH, HEIGHT)
    np.testing.assert_allclose(sample["boxes"], BOXES, atol=1e-9)
