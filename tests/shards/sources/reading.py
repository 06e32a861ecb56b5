"""What tests ask of a source that was listed."""

import json
from pathlib import Path

import fsspec
import pyarrow as pa

from datasvc.testing.source_check import read_part


def read_all(source):
    """Return the samples of all parts as one table, and the bad ones; checks what every batch must be."""
    return read_parts(source, source.parts)


def read_parts(source, parts):
    """Return what `read_all` does of some parts."""
    read = [read_part(source, part) for part in parts]
    table = pa.concat_tables([source.schema.empty_table(), *(samples.table for samples in read)])
    return table, [bad for samples in read for bad in samples.bad]


def to_memory(folder: Path, url: str) -> str:
    """Copy a folder to an fsspec URL; returns it."""
    file_system, root = fsspec.core.url_to_fs(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            file_system.pipe_file(f"{root}/{path.relative_to(folder)}", path.read_bytes())
    return url


def shape_of(field):
    """Return the shape of a sample's tensor as it is stored; `()` for a column of single values."""
    return tuple(json.loads((field.metadata or {}).get(b"datasvc.shape", "[]")))
