"""Contact sheet: thumbnails and captions of samples in one self-contained HTML file, for `head --html`."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from datasvc import durable
from datasvc.errors import BadSampleError, NotFoundError
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.images.thumbnail import thumbnail
from datasvc.shards.query.preview import Preview

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
    page = "".join(_page(title, figures))
    with map_exceptions("write", str(path)):
        # A text with surrogates has no UTF-8 form, so the surrogates are escaped.
        durable.write_file(path, page.encode("utf-8", "backslashreplace"))
    return len(figures)


def _page(title: str, figures: Iterable[str]) -> Iterator[str]:
    """Yield the parts of the HTML page, in order."""
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
    yield f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    yield f"<h1>{escape(title)}</h1>\n<main>\n"
    yield from figures
    yield "</main>\n</body>\n</html>\n"


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
