"""What users of other tools met with boxes, masks and keypoints that pass through crops and flips."""

import io

import numpy as np
import pytest
from PIL import Image

from datasvc.errors import BadSampleError, ConfigError
from datasvc.loaders import AugmentConfig, DataRanks, ImageLoader, ObjectConfig
from datasvc.loaders.augment.objects import View, map_boxes
from datasvc.shards import ingest, open_dataset
from datasvc.shards.sources.common.options import SourceOptions
from tests.shards.sources.images.test_annotated import photo, put, write_coco

SIDE = 100


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def serve(repository, sample, *, scale=1.0, flip=0.0, size=SIDE, **options):
    """Return the only batch of a training on one sample whose window is a square of this share of the area."""
    sample = {"key": "a", "image": png(np.zeros((SIDE, SIDE, 3), np.uint8)), **sample}
    ingest(repository, [sample], "data")
    augment = AugmentConfig(scale=(scale, scale), ratio=(1, 1), flip=flip)
    split = open_dataset(repository, "data")["train"]
    with ImageLoader(
        split, batch_size=1, training=True, size=size, augment=augment, ranks=DataRanks(), **options
    ) as loader:
        return next(iter(loader))


def test_labels_of_boxes_that_are_cut_off_go_with_them(repository):
    """albumentations-team/albumentations#1999: after a random crop there were more labels than boxes."""
    boxes = [[5.0 * n, 5.0 * n, 5.0 * n + 4, 5.0 * n + 4] for n in range(19)]
    batch = serve(repository, {"boxes": boxes, "box_labels": list(range(19))}, scale=0.1, boxes="boxes")
    (target,) = batch.targets
    left, top, right, bottom = batch.windows[0]
    shown = [n for n, (x, y, r, b) in enumerate(boxes) if r > left and x < right and b > top and y < bottom]
    assert len(target["boxes"]) == len(target["labels"]) < 19
    assert set(target["labels"].tolist()) <= set(shown)


def test_a_share_of_the_visible_area_is_of_the_box_and_one_keeps_whole_boxes(repository):
    """albumentations-team/albumentations#1230: 0.64 passed a limit of 0.9; #875: a limit of 1 dropped every box."""
    sample = {"boxes": [[-20.0, -20.0, 80.0, 80.0], [10.0, 10.0, 20.0, 20.0]], "box_labels": [0, 1]}
    batch = serve(repository, sample, boxes="boxes", objects=ObjectConfig(min_visible=1))
    # What lies outside of the image is not cut off by the window.
    assert batch.objects["box_labels"].tolist() == [0, 1]
    view = View(np.array([20.0, 20.0, 500.0, 500.0]), flip=False, width=500, height=500, shown=(480, 480))
    for least, kept in ((0.9, []), (0.63, [[0, 0, 80, 80]])):
        shown, _ = map_boxes(np.array([[0.0, 0.0, 100.0, 100.0]]), view, ObjectConfig(min_visible=least))
        assert shown.tolist() == kept


def test_points_at_the_right_edge_stay_inside_after_a_flip(repository):
    """albumentations-team/albumentations#1500: x = 24.5 of 25 became -0.5, and was lost; #1720: boxes moved."""
    sample = {"boxes": [[0.0, 0.0, 30.0, 10.0]], "keypoints": [[SIDE - 0.5, 50.0, 2.0]]}
    objects = ObjectConfig(num_keypoints=1, flip_pairs=(), min_visible=0)
    batch = serve(repository, sample, flip=1.0, boxes="boxes", keypoints="keypoints", objects=objects)
    assert batch.objects["boxes"].tolist() == [[SIDE - 30.0, 0.0, SIDE, 10.0]]
    assert batch.objects["keypoints"].tolist() == [[[0.5, 50.0, 2.0]]]


def test_a_flip_of_left_and_right_is_refused_until_the_user_names_the_pairs(repository):
    """albumentations-team/AlbumentationsX#87: a mirrored left eye keeps the label of a left eye."""
    sample = {"keypoints": [[10.0, 20.0, 2.0, 30.0, 20.0, 2.0]]}
    with pytest.raises(ConfigError, match="flip_pairs"):
        serve(repository, sample, flip=1.0, keypoints="keypoints", objects=ObjectConfig(num_keypoints=2))


def test_boxes_over_the_edge_and_without_height_do_not_stop_a_training(repository):
    """NVIDIA/DALI#1358 and #3202: an assertion for 1.0016; pytorch/vision#2740: an error for a box without area."""
    sample = {"boxes": [[92.0, 38.0, 100.2, 58.0], [10.0, 44.0, 20.0, 44.0]], "box_labels": [3, 4]}
    batch = serve(repository, sample, boxes="boxes")
    assert batch.objects["boxes"].tolist() == [[92.0, 38.0, 100.0, 58.0]]
    assert batch.objects["box_labels"].tolist() == [3]
    assert batch.num_bad_boxes == 1


def test_pixels_of_a_picture_that_was_turned_later_are_named(repository, tmp_path):
    """roboflow/rf-detr#189: boxes of COCO, and pictures with an EXIF orientation, trained without a word."""
    write_coco(tmp_path / "source", "train", range(2))
    put(tmp_path / "source" / "train" / "000.jpg", photo(orientation=6))
    with pytest.raises(BadSampleError, match="is 40x60 pixels, and its annotation is for 60x40"):
        ingest(repository, str(tmp_path / "source"), "turned", source_options=SourceOptions(format="coco"))


@pytest.mark.parametrize("size", [33, 64, 224])
def test_masks_have_no_numbers_between_those_of_their_classes(repository, size):
    """milesial/Pytorch-UNet#311, ykamikawa/tf-keras-PSPNet#2: resized masks had classes that do not exist."""
    mask = np.random.default_rng(0).choice(np.array([0, 2, 6, 7, 10, 255], np.uint8), (SIDE, SIDE))
    batch = serve(repository, {"seg": png(mask)}, size=size, masks=("seg",))
    assert set(batch.masks["seg"].unique().tolist()) == {0, 2, 6, 7, 10, 255}
