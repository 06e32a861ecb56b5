"""Contact sheet: thumbnails and captions of samples in one self-contained HTML file, for `head --html`."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from datasvc import durable
from datasvc.errors import BadSampleError, ConfigError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.format.schema import KEY, is_blob
from datasvc.shards.images.thumbnail import thumbnail
from datasvc.shards.query.sample_page import find_numbers
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.samples import Sample

_MAX_SIDE = 192  # of a thumbnail, in pixels
_MAX_CHARACTERS = 200  # of a shown value
# A sample's text must not make the browser execute or load anything.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 13px sans-serif; margin: 1.5em; background: #fff; color: #222 }
main { display: flex; flex-wrap: wrap; gap: 12px; align-items: flex-start }
figure { margin: 0; padding: 8px; width: 208px; border: 1px solid #ddd; overflow-wrap: anywhere }
img { display: block; margin: 0 auto 6px; max-width: 100% }
b { display: block } .bad { color: #b00020 } dl { margin: 4px 0 0 } dt { float: left; clear: left; color: #777 }
dd { margin: 0 0 0 6em }
"""


def write_contact_sheet(path: Path, title: str, samples: Iterable[Preview]) -> int:
    """Write an HTML page of thumbnails and captions, which replaces an old file; return the number of samples.

    Raises:
        NotFoundError: the folder of `path` does not exist.
        ConfigError, UnavailableError: the file cannot be written.
    """
    if not path.parent.is_dir():
        raise NotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    figures = [_figure(sample) for sample in samples]
    name = escape(title)
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        f"<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{name}</h1>\n<main>\n{''.join(figures)}</main>\n</body>\n</html>\n"
    )
    with map_exceptions("write", str(path)):
        # A text with surrogates has no UTF-8 form, so the surrogates are escaped.
        durable.write_file(path, page.encode("utf-8", "backslashreplace"))
    return len(figures)


def _figure(sample: Preview) -> str:
    """Return the HTML of a sample: its images, and its class, key and values as a caption."""
    images = "".join(_image(sample.key, encoded) for encoded in sample.images.values())
    label = f"<b>{escape(sample.class_name)}</b>" if sample.class_name is not None else ""
    captions = {"split": sample.split, **sample.values}
    captions |= {name: f"{size} bytes" for name, size in sample.blob_bytes.items()}
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(_shortened(value))}</dd>" for name, value in captions.items()
    )
    return f"<figure>{images}<figcaption>{label}{escape(sample.key)}<dl>{items}</dl></figcaption></figure>\n"


def _image(key: str, encoded: bytes) -> str:
    """Return the HTML of an image's thumbnail, or of the reason why the image cannot be shown."""
    try:
        small = thumbnail(encoded, _MAX_SIDE)
    except BadSampleError as error:
        return f'<p class="bad">{escape(str(error))}</p>'
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    data = base64.b64encode(buffer.getvalue()).decode()
    width, height = small.size
    return f'<img src="data:image/jpeg;base64,{data}" width="{width}" height="{height}" alt="{escape(key)}">'


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


@dataclass(frozen=True)
class Preview:
    """One sample for display.

    Attributes:
        split: name of its split.
        key: its key.
        class_name: class name of its label; None if the label has none.
        values: values by column, without `key` and blobs; a null blob is shown here as None.
        blob_bytes: size of each blob by column.
        images: encoded images by column, in column order.
    """

    split: str
    key: str
    class_name: str | None
    values: Mapping[str, Any]
    blob_bytes: Mapping[str, int]
    images: Mapping[str, bytes]


def preview_samples(split: Split, num_samples: int, where: str | None = None) -> Iterator[Preview]:
    """Yield the first live (not deleted) samples of a split that satisfy a condition, in their stored order.

    Raises:
        ConfigError: `num_samples` is negative, or DuckDB rejects the condition.
        CorruptDataError, NotFoundError, UnavailableError: a shard cannot be read.
    """
    if num_samples < 0:
        raise ConfigError(f"cannot show {count_text(num_samples, 'sample')}; expected 0 or more")
    schema = split.table.sample_schema
    samples: Iterator[Sample] = islice(split, num_samples)
    if where is not None:
        samples = (split[number] for number in find_numbers(split, where, num_samples))
    return (_preview(split, schema, sample) for sample in samples)


def _preview(split: Split, schema: pa.Schema, sample: Sample) -> Preview:
    blobs = {field.name: sample[field.name] for field in schema if is_blob(field.type)}
    # A null blob has no size, so it is shown among the values.
    present = {name: blob for name, blob in blobs.items() if blob is not None}
    return Preview(
        split.name,
        sample[KEY],
        sample.class_name,
        {name: value for name, value in sample.items() if name != KEY and name not in present},
        {name: len(blob) for name, blob in present.items()},
        {name: present[name] for name in sample.images if name in present},
    )
