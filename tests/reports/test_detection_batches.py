"""What users of other tools met with mosaics, padded batches, and the run lengths of COCO."""

import numpy as np
import pytest
import torch

from datasvc.errors import BadSampleError, ConfigError
from datasvc.loaders import AugmentConfig, DataRanks, Fit, ImageLoader, ObjectConfig
from datasvc.shards import ingest, open_dataset
from datasvc.shards.images.run_lengths import decode_runs, encode_runs
from datasvc.shards.sources.common.options import SourceOptions
from tests.reports.test_boxes_and_masks import png
from tests.shards.sources.images.test_annotated import HEIGHT, WIDTH, write_coco

SIDE = 64
# Everything but the bottom right of the picture: its box is the whole picture.
CORNER = [0.0, 0.0, 64.0, 0.0, 64.0, 8.0, 8.0, 8.0, 8.0, 64.0, 0.0, 64.0]


def corners(repository, num):
    """Return a split of black pictures whose object is an angle along two sides."""
    image = png(np.zeros((SIDE, SIDE, 3), np.uint8))
    sample = {"image": image, "boxes": [[0.0, 0.0, 64.0, 64.0]], "box_labels": [3], "polygons": [[CORNER]]}
    ingest(repository, [{"key": str(number), **sample} for number in range(num)], "corners")
    return open_dataset(repository, "corners")["train"]


def load(split, batch_size=4, **options):
    layers = {"boxes": "boxes", "polygons": "polygons"}
    defaults = {"training": True, "size": SIDE, "ranks": DataRanks(), "seed": 3, **layers}
    return ImageLoader(split, batch_size=batch_size, **{**defaults, **options})


def test_boxes_of_a_mosaic_have_something_of_their_object(repository):
    """ultralytics/ultralytics#21925 and #19814: boxes of tiles that show only the empty part of a box."""
    split = corners(repository, 24)
    whole = AugmentConfig(scale=(1, 1), ratio=(1, 1), flip=0, mosaic=1)
    sizes = set()
    for fits in (False, True):
        with load(split, augment=whole, objects=ObjectConfig(min_visible=0.01, fit_to_masks=fits)) as loader:
            for batch in loader:
                for target in batch.targets:
                    for box, mask in zip(target["boxes"].tolist(), target["masks"].numpy(), strict=True):
                        rows, columns = np.nonzero(mask)
                        if fits:
                            assert box == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                        sizes.add((fits, len(rows) > 0))
    # At the top left of a mosaic is the bottom right of its image, where there is nothing of the object.
    assert sizes == {(False, False), (False, True), (True, True)}


def test_the_last_epochs_have_no_mosaics_also_after_a_resume(repository):
    """ultralytics/ultralytics#25762, Megvii-BaseDetection/YOLOX#85: mosaics in epochs that should have none."""
    split, counts, states = corners(repository, 8), [], []
    config = AugmentConfig(mosaic=1, mosaic_epochs=2)
    with load(split, augment=config) as loader:
        for _ in range(4):
            batches = list(loader)
            counts.append(sum(len(set(each)) for batch in batches for each in batch.mosaics.sources.tolist()))
            states.append(loader.state_dict())
    assert counts == [32, 32, 8, 8]
    for number, state in enumerate(states[:3]):
        with load(split, augment=config) as loader:
            loader.load_state_dict(state)
            found = [set(each) for batch in loader for each in batch.mosaics.sources.tolist()]
        assert sum(map(len, found)) == counts[number + 1]


def test_objects_that_a_crop_leaves_without_a_pixel_go_if_the_user_says_so(repository):
    """facebookresearch/Mask2Former#215, albumentations-team/albumentations#745: empty masks spoil a training."""
    split, crops = corners(repository, 24), AugmentConfig(scale=(0.1, 0.2), ratio=(1, 1))
    shown = []
    for objects in (ObjectConfig(min_visible=0), ObjectConfig(min_visible=0, fit_to_masks=True)):
        with load(split, augment=crops, objects=objects) as loader:
            batches = list(loader)
        shown.append([bool(mask.any()) for batch in batches for mask in batch.objects["masks"]])
        assert all(
            len(batch.objects[name]) == len(batch.objects["masks"]) for batch in batches for name in batch.objects
        )
    assert len(shown[0]) == 24
    assert shown[1] == [True] * sum(shown[0])
    assert 0 < sum(shown[0]) < 24
    with pytest.raises(ConfigError, match="give polygons="):
        load(split, polygons=None, objects=ObjectConfig(fit_to_masks=True))


def test_masks_stay_with_their_image_beside_one_without_objects(repository):
    """ultralytics/ultralytics#18832: after an image without labels, each image had the masks of the one before."""
    image = png(np.zeros((SIDE, SIDE, 3), np.uint8))
    squares = [[8.0 * number, 0.0, 8.0 * number + 8, 8.0] for number in range(8)]
    samples = [
        {"key": str(number), "image": image, "boxes": [], "box_labels": [], "polygons": []}
        if number % 3 == 0
        else {"key": str(number), "image": image, "boxes": [[x, y, r, b]], "box_labels": [number]}
        | {"polygons": [[[x, y, r, y, r, b, x, b]]]}
        for number, (x, y, r, b) in enumerate(squares)
    ]
    ingest(repository, samples, "some")
    split = open_dataset(repository, "some")["train"]
    for augment in (AugmentConfig(flip=0, mosaic=1, scale=(1, 1), ratio=(1, 1)), AugmentConfig(flip=0)):
        size = SIDE if augment.mosaic else None
        with load(split, batch_size=8, augment=augment, size=size) as loader:
            (batch,) = list(loader)
        for index, target in enumerate(batch.targets):
            if not augment.mosaic:
                assert len(target["masks"]) == (int(batch.keys[index]) % 3 != 0)
            for box, mask, label in zip(target["boxes"], target["masks"], target["labels"].tolist(), strict=True):
                left, top, right, bottom = box.int().tolist()
                assert mask.sum() == mask[top:bottom, left:right].sum() == (right - left) * (bottom - top)
                assert augment.mosaic or label == int(batch.keys[index])


def test_sizes_of_a_padded_batch_do_not_count_what_rounds_it_up(repository):
    """roboflow/rf-detr#992: padding to a multiple of 32 was marked as a part of the image."""
    shapes = [(50, 40), (40, 50)]
    samples = [{"key": str(n), "image": png(np.full((*shape, 3), 255, np.uint8))} for n, shape in enumerate(shapes)]
    ingest(repository, samples, "two")
    split, fit = open_dataset(repository, "two")["train"], Fit(multiple=32)
    with ImageLoader(split, batch_size=2, training=False, size=fit, pixels="uint8", ranks=DataRanks()) as loader:
        batch = next(iter(loader))
    assert batch.images.shape == (2, 3, 64, 64)
    for image, size, key in zip(batch.images, batch.sizes.tolist(), batch.keys, strict=True):
        assert tuple(size) == shapes[int(key)]
        assert (image > 0).sum() == 3 * 50 * 40
    assert torch.equal(batch.padding, batch.images[:, 0] == 0)
    with ImageLoader(split, batch_size=2, training=False, size=32, ranks=DataRanks()) as loader:
        assert not next(loader.numpy()).padding.any()


def annotated(repository, root, segmentation, **fields):
    """Return the only sample of COCO with this segmentation."""
    annotation = {"id": 1, "image_id": 0, "category_id": 7, "bbox": [1, 2, 30, 30], "segmentation": segmentation}
    write_coco(root / "source", "train", range(1), annotations=[annotation | fields])
    ingest(repository, str(root / "source"), "coco", source_options=SourceOptions(format="coco"))
    return open_dataset(repository, "coco")["train"]


@pytest.mark.parametrize("crowd", [0, 1])
def test_run_lengths_give_masks_of_crowds_and_of_single_objects(repository, tmp_path, crowd):
    """facebookresearch/detectron2#1692: counts as a list failed; PaddlePaddle/PaddleDetection#7261: no masks."""
    mask = np.zeros((HEIGHT, WIDTH), np.bool_)
    mask[5:20, 10:33] = True
    runs = {"size": [HEIGHT, WIDTH], "counts": encode_runs(mask)}
    split = annotated(repository, tmp_path, runs, iscrowd=crowd)
    with load(split, batch_size=1, training=False, size=None) as loader:
        batch = next(iter(loader))
    assert np.array_equal(batch.objects["masks"].numpy(), mask[None])


def test_run_lengths_of_another_size_are_scaled_and_of_another_shape_are_refused(repository, tmp_path):
    """cocodataset/cocoapi#488, matterport/Mask_RCNN#288: masks of another size; maskrcnn-benchmark#859: no error."""
    mask = np.zeros((HEIGHT // 2, WIDTH // 2), np.bool_)
    mask[3:9, 5:20] = True
    runs = {"size": [HEIGHT // 2, WIDTH // 2], "counts": encode_runs(mask)}
    (sample,) = annotated(repository, tmp_path / "half", runs)
    found = decode_runs(sample["mask_runs"][0], WIDTH, HEIGHT)
    assert np.array_equal(found, mask.repeat(2, axis=0).repeat(2, axis=1))
    with pytest.raises(BadSampleError, match="run lengths"):
        annotated(repository, tmp_path / "turned", {**runs, "size": [WIDTH // 2, HEIGHT // 2]})
