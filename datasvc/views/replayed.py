"""How the batch of a replayed step looks: facts, a contact sheet, and files."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from datasvc import durable
from datasvc.errors import ConfigError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository import Repository
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.images.thumbnail import png_thumbnail
from datasvc.shards.query.contact_sheet import Preview
from datasvc.sizes import format_size
from datasvc.views.loading import to_array, to_levels

if TYPE_CHECKING:
    from datasvc.replay.batch_at import ReplayedBatch

_MAX_NAMES: Final = 10
_SIDE: Final = 192  # of a thumbnail, in pixels
_MAX_PIXEL_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class ReplaySheet:
    """A replayed batch as a page shows it.

    Attributes:
        facts: see `replay_facts`.
        batch: its JSON values, with the keys of all samples.
        ranks: number of data ranks; None: not recorded.
        previews: the first samples, with thumbnails as PNG files.
        purged: keys of samples that were purged since.
        fault: why there are no previews; None: there are.
    """

    facts: dict[str, Any]
    batch: dict[str, Any]
    ranks: int | None
    previews: list[Preview]
    purged: list[str]
    fault: str | None = None


def make_sheet(repository: Repository, ref: str, rank: int | None, max_samples: int) -> ReplaySheet:
    """Replay a step, see `batch_at`, and return its facts with the first `max_samples` samples.

    Raises the errors of `batch_at`; those of its `batch` are the `fault` of the sheet.
    """
    from datasvc.replay.batch_at import batch_at

    found = batch_at(repository, ref, rank=rank)
    sheet = ReplaySheet(replay_facts(found), found.to_json(), found.step.ranks, [], [])
    height, width = _largest_image(repository, found)
    if (num_bytes := 12 * len(found.keys) * height * width) > _MAX_PIXEL_BYTES:  # 3 colours of 4 bytes
        return replace(
            sheet, fault=f"the images of this batch take {format_size(num_bytes)}; look at those of a rank"
        )
    try:
        shown = [
            replace(each, images={name: png_thumbnail(image, _SIDE) for name, image in each.images.items()})
            for each in islice(previews(found), max_samples)
        ]
        return replace(sheet, previews=shown, purged=found.purged)
    except (ConfigError, NotFoundError) as error:
        return replace(sheet, fault=str(error))


def _largest_image(repository: Repository, found: ReplayedBatch) -> tuple[int, int]:
    """Return height and width of the images of a batch, of those that keep their shape the largest; 0 without any."""
    from datasvc.loaders.augment.fit import Fit, parse_size
    from datasvc.loaders.core.mixture import largest
    from datasvc.replay.rebuild import open_samples

    size = parse_size((found.step.use.loader or {}).get("size", 0))
    if not isinstance(size, Fit):
        return (size, size) if isinstance(size, int) else size
    samples = open_samples(repository, found.step.use)
    return size.frame(size.longer or largest(samples, "max_height"), size.longer or largest(samples, "max_width"))


def replay_facts(replay: ReplayedBatch) -> dict[str, Any]:
    """Return what the batch is, for a terminal or a page."""
    step, size = replay.step, len(replay.keys)
    recorded = "" if step.is_recorded else f", of step {step.version_step}, as the run would have continued it"
    facts = {
        "step": f"{step.step}, by {step.version}{recorded}",
        "run": step.run or "not recorded",
        "data": str(step.use),
        "epoch": step.epoch,
        "positions": f"{step.start:,} to {step.stop - 1:,} of {step.num_samples:,}",
        "samples": f"{size:,}" if replay.rank is None else f"{size:,}, those of rank {replay.rank} of {step.ranks}",
    }
    if replay.masked:
        facts["masked"] = f"{len(replay.masked):,} on request"
    if replay.purged:
        facts["purged"] = describe_purged(replay.purged)
    return facts


def previews(replay: ReplayedBatch) -> Iterator[Preview]:
    """Yield the samples of a batch for a contact sheet, with the images as the training got them.

    Raises the errors of `ReplayedBatch.batch`.
    """
    batch: Any = replay.batch
    images = to_levels(to_array(batch.images), batch.display) if hasattr(batch, "images") else None
    labels = None if getattr(batch, "labels", None) is None else to_array(batch.labels)
    mask = to_array(batch.mask).tolist()
    for index, key in enumerate(replay.keys):
        values: dict[str, Any] = {"position": int(replay.positions[index])}
        if not mask[index]:
            reason = "purged" if replay.is_purged[index] else "yes"
            values["masked"] = batch.bad.get(index, reason) if images is not None else reason
        class_name = None
        if images is None:
            values["tokens"] = " ".join(map(str, to_array(batch.tokens[index]).tolist()))
        elif labels is not None:
            classes, label = batch.display.classes, int(labels[index])
            class_name = classes[label] if 0 <= label < len(classes) else f"label {label}"
        encoded = {} if images is None else {"image": _png(images[index])}
        yield Preview(replay.sources[index], key, class_name, values, {}, encoded)


def write_replay(replay: ReplayedBatch, folder: Path) -> int:
    """Write a batch to a new folder, and return the number of its samples.

    `inputs.npy`, `labels.npy` and `mask.npy` have the arrays as the training got them, `batch.json` the keys, and
    `00000.png` the first image, in 8 bits.

    Raises:
        ConfigError: the folder exists and is not empty; or an error of `ReplayedBatch.batch`.
        UnavailableError: a file cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder; give a new one")
    batch: Any = replay.batch
    inputs, labels = batch
    durable.make_folder(folder)
    arrays = {"inputs": inputs, "labels": labels, "mask": batch.mask}
    files = {f"{name}.npy": _npy(to_array(value)) for name, value in arrays.items() if value is not None}
    if hasattr(batch, "images"):
        levels = to_levels(to_array(batch.images), batch.display)
        files |= {f"{index:05d}.png": _png(image) for index, image in enumerate(levels)}
    files["batch.json"] = json.dumps(replay.to_json(), indent=1).encode()
    for name, content in files.items():
        with map_exceptions("write", str(folder / name)):
            durable.write_file(folder / name, content)
    return len(replay.keys)


def describe_purged(keys: list[str]) -> str:
    """Return which samples were purged, and what a replay has of them."""
    names = f"{', '.join(keys[:_MAX_NAMES])}{', ...' if len(keys) > _MAX_NAMES else ''}"
    return f"{count_text(len(keys), 'sample')} without values, masked in the replay: {names}"


def _npy(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return file.getvalue()


def _png(image: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(file, "PNG")
    return file.getvalue()
