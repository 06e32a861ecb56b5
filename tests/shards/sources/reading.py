"""What tests ask of a source that was listed."""

from pathlib import Path

import fsspec
import pyarrow as pa

from datasvc.shards.sources.common.source import BATCH_BYTES, BATCH_SAMPLES, BadSample


def read_all(source):
    """Return the samples of all parts as one table, and the bad ones; checks what every source promises."""
    batches, bad = [], []
    for part in source.parts:
        num_samples = 0
        for found in source.read(part):
            if isinstance(found, BadSample):
                assert found.split == part.split
                bad.append(found)
                continue
            found.validate(full=True)
            assert found.schema.equals(source.schema, check_metadata=True)
            assert 0 < found.num_rows <= BATCH_SAMPLES
            assert found.num_rows == 1 or found.nbytes <= BATCH_BYTES
            assert not any(
                column.null_count for column, field in zip(found, found.schema, strict=True) if not field.nullable
            )
            num_samples += found.num_rows
            batches.append(found)
        assert bad or part.num_samples in (None, num_samples)
    return pa.Table.from_batches(batches, source.schema), bad


def to_memory(folder: Path, url: str) -> str:
    """Copy a folder to an fsspec URL; returns it."""
    file_system, root = fsspec.core.url_to_fs(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            file_system.pipe_file(f"{root}/{path.relative_to(folder)}", path.read_bytes())
    return url
