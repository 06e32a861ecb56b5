"""Models of other formats in: read block by block, stored as a version; memory does not grow with the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from datasvc.errors import ConfigError, UnavailableError
from datasvc.models.interop.detect import read_foreign
from datasvc.models.interop.skeleton import check_skeleton
from datasvc.models.interop.state import ForeignState, ForeignTensor, check_tensor_name, dict_skeleton, flat_skeleton
from datasvc.models.tensors.name_filter import map_names, select_names
from datasvc.models.tensors.tensor_table import ITEM_BYTES, Chunk, TensorRecord, join_chunks
from datasvc.models.tensors.write import Codec, StoredTensors, TensorBlock, store_chunks
from datasvc.models.versions.code_revision import CodeRevision
from datasvc.models.versions.commit import StoredState, base_records, commit
from datasvc.models.versions.metadata import VersionMetadata
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import check_name

BATCH_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        version: the new version.
        format: what it was read as.
        num_tensors: in it.
        bytes: of its tensors in memory.
        new_bytes: that were not in the repository before.
        ignored: tensors of the source that its index does not name.
    """

    version: Resolved
    format: str
    num_tensors: int
    bytes: int
    new_bytes: int
    ignored: tuple[str, ...]


def import_model(
    repository: Repository,
    source: str | Path,
    name: str,
    *,
    only: Collection[str] = (),
    exclude: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    prefix: str = "model",
    codec: Codec = "delta",
    step: int = 0,
    parent: str | None = None,
    message: str = "",
    begin: Callable[[int], None] | None = None,
    report: Callable[[int], None] | None = None,
) -> ImportReport:
    """Store a safetensors file, Hugging Face or DCP folder, or file of torch.save as a model's next version.

    Nothing in the source is ever run. A bare set of tensors, as a state dict is, becomes `{prefix: tensors}`; a whole
    checkpoint keeps its tree, unless a part of it or other names are asked for: then it becomes a dict of tensors by
    name.

    Args:
        repository: where to.
        source: the file or folder; it must not change meanwhile.
        name: of the model, made when new.
        only: which tensors, by their names in the source; see `name_filter.select_names`.
        exclude: which not.
        rename: maps the source's names; see `name_filter.map_names`.
        prefix: where a bare set of tensors goes in the state; "" for the state itself.
        codec: as of `write.store_tensors`; differences are made to `parent`.
        step: optimizer steps behind it, where that is known.
        parent: the version that it continues.
        message: for people.
        begin: called once with the bytes to come.
        report: called with the bytes of each chunk that is stored, from any thread.

    Raises:
        NotFoundError: nothing is at `source`, or there is no such parent.
        ConfigError: see `detect.read_foreign`, `selection`.
        CorruptDataError: the source is damaged; nothing is visible.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`; or the source cannot be read.
    """
    check_name(name, "model")
    path = Path(source)
    # Nothing is read for an import whose parent is not there, whatever its codec.
    if parent is not None:
        parent = str(repository.resolve("models", parent))
    base = base_records(repository, name, parent) if parent and codec == "delta" else ()
    foreign = read_foreign(path)
    tensors, skeleton = arrange(foreign, only, exclude, rename, prefix)
    check_arranged(tensors, skeleton, str(path))
    if begin is not None:
        begin(sum(map(num_bytes, tensors)))
    try:
        stored = store_blocks(repository, tensors, base=base, codec=codec, report=report)
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error}") from error
    kept = {name: repository.objects.put(content).digest for name, content in foreign.files.items()}
    files = {"files": kept} if kept else {}
    # What trained it is not the code that happens to lie here.
    elsewhere = CodeRevision(None, dirty=False)
    version = commit(
        repository,
        name,
        StoredState(stored.records, skeleton, stored.new_bytes, stored.num_nonfinite),
        VersionMetadata(step, config=foreign.config, parent=parent, message=message, code=elsewhere),
        extra={"imported": {"format": foreign.format, "path": str(path), **files}},
        extra_objects=kept.values(),
    )
    size = sum(record.nbytes for record in stored.records)
    return ImportReport(version, foreign.format, len(tensors), size, stored.new_bytes, foreign.ignored)


def arrange(
    foreign: ForeignState,
    only: Collection[str],
    exclude: Collection[str],
    rename: Mapping[str, str] | None,
    prefix: str,
) -> tuple[list[ForeignTensor], Any]:
    """Return the tensors that are wanted, by the names that they get, and the state's skeleton around them."""
    by_name = {tensor.name: tensor for tensor in foreign.tensors}
    mapped = map_names(select_names(list(by_name), only, exclude), rename)
    if foreign.skeleton is not None and not (only or exclude or rename):
        return list(foreign.tensors), foreign.skeleton
    inside = prefix if foreign.skeleton is None else ""
    full = {new: f"{inside}.{new}" if inside else new for new in mapped.values()}
    leaves = flat_skeleton(full)
    tensors = [replace(by_name[old], name=full[new]) for old, new in mapped.items()]
    return tensors, dict_skeleton({inside: leaves}) if inside else leaves


def check_arranged(tensors: Sequence[ForeignTensor], skeleton: Any, location: str) -> None:
    """Raise before anything is stored where a tensor or the state cannot be. Raises ConfigError, CorruptDataError."""
    for tensor in tensors:
        check_tensor_name(tensor.name, location)
        if tensor.dtype not in ITEM_BYTES:
            raise ConfigError(
                f"{location}: tensor {tensor.name!r} is {tensor.dtype}, which cannot be stored; leave it out by "
                "--exclude, or cast it"
            )
    check_skeleton(skeleton, [tensor.name for tensor in tensors], location)


def store_blocks(
    repository: Repository,
    tensors: Sequence[ForeignTensor],
    *,
    base: Sequence[TensorRecord] = (),
    codec: Codec = "delta",
    report: Callable[[int], None] | None = None,
) -> StoredTensors:
    """Store foreign tensors, holding at most twice 64 MiB of them, or a block. Raises as `import_model`."""
    chunks: dict[str, list[Chunk]] = {tensor.name: [] for tensor in tensors}
    new_bytes, nonfinite = 0, Counter[str]()
    for batch in _batches(tensors):
        done = store_chunks(repository.objects, batch, base=base, codec=codec, report=report)
        for name, chunk in done.chunks:
            chunks[name].append(chunk)
        new_bytes += done.new_bytes
        nonfinite.update(done.num_nonfinite)
    records = tuple(join_chunks(each.name, each.dtype, each.shape, chunks[each.name]) for each in tensors)
    return StoredTensors(records, new_bytes, dict(nonfinite))


def num_bytes(tensor: ForeignTensor) -> int:
    """Return the bytes of a tensor in memory."""
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def _batches(tensors: Iterable[ForeignTensor]) -> Iterator[list[TensorBlock]]:
    batch: list[TensorBlock] = []
    batch_bytes = 0
    for tensor in tensors:
        for start, block in tensor.blocks():
            batch.append(TensorBlock(tensor.name, start, block))
            batch_bytes += block.nbytes
            if batch_bytes >= BATCH_BYTES:
                yield batch
                batch, batch_bytes = [], 0
    if batch:
        yield batch
