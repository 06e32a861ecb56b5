"""An image batch as HTML for a notebook: a grid of its pictures as the model gets them, with labels."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from datasvc.drawing import Markup, facts_table, figure, markup, standalone
from datasvc.loaders.decode.pixels import Pixels

if TYPE_CHECKING:
    from datasvc.loaders.decode.pixels import PixelFormat
    from datasvc.loaders.images.image_batch import ImageBatch

_MAX_IMAGES: Final = 64
_MAX_SIDE: Final = 128  # of a shown picture, in pixels


@dataclass(frozen=True)
class BatchDisplay:
    """What the loader knows of its batches that their arrays do not say.

    Attributes:
        pixels: format of the images, by which they are converted back to levels.
        classes: class names; label i belongs to `classes[i]`.
    """

    pixels: PixelFormat
    classes: tuple[str, ...]


def batch_html(batch: ImageBatch[Any]) -> Markup:
    """Return the first 64 images of a batch with class name or label and position; tensors are copied from a GPU."""
    count = len(batch.positions)
    shown = min(count, _MAX_IMAGES)
    images = to_levels(to_array(batch.images[:shown]), batch.display)
    labels = [None] * shown if batch.labels is None else to_array(batch.labels[:shown]).tolist()
    mask = to_array(batch.mask[:shown]).tolist()
    figures = [
        figure(
            _png(images[index]),
            [
                _label(labels[index], batch.display),
                f"position {batch.positions[index]:,}",
                "" if mask[index] else "masked",
            ],
            title=batch.bad.get(index, f"image {index} of the batch"),
            is_problem=not mask[index],
        )
        for index in range(shown)
    ]
    facts: dict[str, str | float | None] = {
        "batch of images": f"{count:,}" + (f", the first {shown} are shown" if shown < count else ""),
        "epoch": batch.epoch,
        "shape": f"{tuple(batch.images.shape)}, {batch.images.dtype}",
        "device": str(getattr(batch.images, "device", "cpu")),
    }
    return standalone(facts_table(facts), markup(figures))


def to_array(values: Any) -> npt.NDArray[Any]:
    """Return a tensor on any device, or an array, as a NumPy array; bfloat16 as float32."""
    if isinstance(values, np.ndarray):
        return values
    tensor = values.detach().cpu()
    return np.asarray((tensor.float() if tensor.is_floating_point() else tensor).numpy())


def to_levels(images: npt.NDArray[Any], display: BatchDisplay | None) -> Pixels:
    """Return images as `uint8[n, height, width, 3]`.

    Args:
        images: of the type and layout of the loader.
        display: how they were normalised; None: the lowest value of the batch becomes 0, and the highest 255.
    """
    is_planar = images.shape[1] in {1, 3} if display is None else display.pixels.layout == "NCHW"
    last = np.moveaxis(images, 1, -1) if is_planar else images
    if last.dtype == np.uint8:
        return last
    levels = np.nan_to_num(last.astype(np.float32))
    if display is not None:
        levels = (levels - display.pixels.shift) / display.pixels.scale
    elif levels.size:
        low, high = float(levels.min()), float(levels.max())
        levels = (levels - low) * (255 / (high - low or 1))
    return np.clip(np.rint(levels), 0, 255).astype(np.uint8)


def _label(label: int | None, display: BatchDisplay | None) -> str:
    if label is None:
        return ""
    classes = () if display is None else display.classes
    return classes[label] if 0 <= label < len(classes) else f"label {label}"


def _png(image: Pixels) -> bytes:
    from PIL import Image  # for a picture only: a loader may run without it

    file = io.BytesIO()
    picture = Image.fromarray(np.ascontiguousarray(np.broadcast_to(image, (*image.shape[:2], 3))))
    picture.thumbnail((_MAX_SIDE, _MAX_SIDE))
    picture.save(file, "PNG")
    return file.getvalue()
