"""Import models of other file formats as versions. A file's format is recognised by its content, not by its name.

Tensors are read and stored block by block, so memory does not grow with the model. No code in the source is executed.
A foreign state or tensor is one that was read from another format and is not stored yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.models.interop.dcp_folders import METADATA_FILE, read_dcp_folder
from datasvc.models.interop.huggingface_folder import (
    TORCH_FILE,
    TORCH_INDEX_FILE,
    read_safetensors_index,
    read_torch_folder,
    with_small_files,
)
from datasvc.models.interop.safetensors_files import INDEX_FILE, SUFFIX, read_safetensors, read_safetensors_folder
from datasvc.models.interop.state import (
    ForeignState,
    ForeignTensor,
    check_inside,
    check_kept,
    check_regular,
    check_tensor_name,
    flat_skeleton,
)
from datasvc.models.interop.torch_reader import CHECKPOINT_FILE, LEGACY, READER_MEMORY_BYTES, ZIP, read_torch_file
from datasvc.models.tensors.container_types import typed_as, untyped
from datasvc.models.tensors.name_filter import is_selected, map_names, select_names
from datasvc.models.tensors.state_tree import dict_parts, dict_skeleton, encode_state, unflatten
from datasvc.models.tensors.tensor_table import ITEM_BYTES, Chunk, TensorRecord, join_chunks
from datasvc.models.tensors.write import Codec, StoredState, TensorBlock, store_chunks
from datasvc.models.versions.code_revision import CodeRevision
from datasvc.models.versions.commit import base_records, commit
from datasvc.models.versions.metadata import VersionMetadata
from datasvc.printable import count_text
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import check_name
from datasvc.sizes import group_by_size

BATCH_BYTES: Final = 64 << 20  # size of the blocks that are stored together
_HEAD_BYTES: Final = 16  # enough bytes to recognise a format


@dataclass(frozen=True)
class ImportReport:
    """Result of an import.

    Attributes:
        version: the new version.
        format: format of the source: "safetensors", "huggingface", "torch" or "dcp".
        bytes: size of the tensors in memory.
        new_bytes: number of bytes that were not in the repository before.
        ignored: names of tensors that were not imported, because the index of the source does not list them.
        files: names of the small files that were stored unchanged with the version, such as `tokenizer.json`.
        left_out: names of the files and subfolders of the source that were not imported.
    """

    version: Resolved
    format: str
    num_tensors: int
    bytes: int
    new_bytes: int
    ignored: tuple[str, ...]
    files: tuple[str, ...]
    left_out: tuple[str, ...]


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
    reader_memory_bytes: int = READER_MEMORY_BYTES,
    progress: Progress = NO_PROGRESS,
) -> ImportReport:
    """Store a safetensors file, Hugging Face or DCP folder, or torch.save file as the next version of a model.

    A plain dict of tensors becomes `{prefix: tensors}`. A whole checkpoint keeps its state tree. But with `only`,
    `rename`, or tensors in `exclude`, it becomes a dict of tensors by name.

    Args:
        repository: repository to import into.
        source: file or folder; it must not change during the import.
        name: name of the model; created if it does not exist.
        only: tensors to import, by their names in the source; see `name_filter.select_names`.
        exclude: tensors, or other values of a checkpoint, to leave out.
        rename: new names by names in the source; see `name_filter.map_names`.
        prefix: key under which the state holds a plain dict of tensors; "": the dict itself is the state.
        codec: codec of the chunks, see `write.store_tensors`; "delta" stores differences to the tensors of `parent`.
        step: number of optimizer steps that the model was trained for; 0 if unknown.
        parent: version that the new one continues.
        message: message of the commit.
        reader_memory_bytes: memory limit of the process that reads a torch.save file or a DCP folder; the memory of
            the tensors does not count.
        progress: counts the bytes of each chunk that was stored.

    Raises:
        NotFoundError: `source` or `parent` does not exist.
        ConfigError: the source has no supported format or holds values that cannot be stored, see `read_foreign`; or
            the selection of tensors is not valid, see `name_filter`.
        CorruptDataError: the source is damaged; no version is created.
        UnavailableError: the source cannot be read.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    check_name(name, "model")
    path = Path(source)
    # Resolve the parent before the source is read, so that a wrong reference fails at once.
    if parent is not None:
        parent = str(repository.resolve("models", parent))
    # Only the codec "delta" needs the parent's tensors.
    base = base_records(repository, name, parent) if parent and codec == "delta" else ()
    foreign = read_foreign(path, reader_memory_bytes)
    tensors, skeleton = arrange(foreign, only, exclude, rename, prefix, str(path))
    check_arranged(tensors, skeleton, str(path))
    progress.begin(sum(tensor.nbytes for tensor in tensors))
    try:
        stored = store_blocks(repository, tensors, base=base, codec=codec, progress=progress)
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error}") from error
    # No revision is recorded, because the code in the working folder is not the code that trained the model.
    unknown_code = CodeRevision(None, dirty=False)
    metadata = VersionMetadata(step, config=foreign.config, parent=parent, message=message, code=unknown_code)
    return _commit_foreign(repository, name, path, foreign, replace(stored, skeleton=skeleton), metadata)


def _commit_foreign(
    repository: Repository,
    name: str,
    path: Path,
    foreign: ForeignState,
    stored: StoredState,
    metadata: VersionMetadata,
) -> ImportReport:
    """Commit a stored state as a version, with the small files of its source."""
    digests = {name: repository.objects.put(content).digest for name, content in foreign.files.items()}
    files = {"files": digests} if digests else {}
    extra = {"imported": {"format": foreign.format, "path": str(path), **files}}
    return ImportReport(
        version=commit(repository, name, stored, metadata, extra=extra, extra_objects=digests.values()),
        format=foreign.format,
        num_tensors=len(stored.records),
        bytes=sum(record.nbytes for record in stored.records),
        new_bytes=stored.new_bytes,
        ignored=foreign.ignored,
        files=tuple(digests),
        left_out=foreign.left_out,
    )


def read_foreign(source: Path, reader_memory_bytes: int = READER_MEMORY_BYTES) -> ForeignState:
    """Return the state in a file or folder of any supported format.

    Raises:
        NotFoundError: `source` does not exist.
        ConfigError: the format is not supported, or the state has values that only code from the file could create.
        CorruptDataError: the source is damaged.
        UnavailableError: the source cannot be read.
    """
    try:
        if source.is_dir():
            return _read_folder(source, reader_memory_bytes)
        return _read_file(check_regular(source), reader_memory_bytes)
    except FileNotFoundError as error:
        raise NotFoundError(f"{error.filename or source} does not exist") from error
    except OSError as error:
        raise UnavailableError(f"cannot read {source}: {error}") from error


def _read_folder(folder: Path, reader_memory_bytes: int) -> ForeignState:
    """Read the model in a folder; the names of its files tell the format."""
    if (folder / METADATA_FILE).is_file():
        return read_dcp_folder(folder, reader_memory_bytes)
    names = sorted(file.name for file in folder.iterdir())
    if INDEX_FILE in names:
        return with_small_files(read_safetensors_index(folder), folder)
    if any(name.endswith(SUFFIX) for name in names):
        state = read_safetensors_folder(folder)
        return with_small_files(state, folder) if state.format == "huggingface" else state
    if TORCH_FILE in names or TORCH_INDEX_FILE in names:
        return with_small_files(read_torch_folder(folder, reader_memory_bytes), folder)
    if CHECKPOINT_FILE in names:
        return read_torch_file(check_inside(folder, folder / CHECKPOINT_FILE), reader_memory_bytes)
    raise ConfigError(
        f"{folder} is not a model: expected {SUFFIX} files, {TORCH_FILE}, a DCP folder with {METADATA_FILE}, or "
        f"{CHECKPOINT_FILE}; it has: {', '.join(names[:10]) or 'nothing'}. To import a torch.save file, give the "
        "path of the file"
    )


def _read_file(path: Path, reader_memory_bytes: int) -> ForeignState:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith((ZIP, LEGACY)):
        return read_torch_file(path, reader_memory_bytes)
    # A safetensors file begins with the length of its JSON header, in 8 bytes.
    if head[8:9] == b"{" or path.suffix == SUFFIX:
        return read_safetensors(path)
    raise ConfigError(
        f"{path} is neither a safetensors file nor a torch.save file: it begins with {head[:8].hex(' ') or 'nothing'}"
    )


def arrange(
    foreign: ForeignState,
    only: Collection[str],
    exclude: Collection[str],
    rename: Mapping[str, str] | None,
    prefix: str,
    location: str,
) -> tuple[list[ForeignTensor], Any]:
    """Return the selected tensors with their new names, and the skeleton of their state tree, see `import_model`.

    Raises ConfigError: a value that is kept cannot be stored, or a pattern matches nothing.
    """
    by_name = {tensor.name: tensor for tensor in foreign.tensors}
    # Patterns may name values that are no tensors, such as what cannot be stored.
    values = [*value_paths(foreign.skeleton), *foreign.refused]
    patterns = (exclude,) if isinstance(exclude, str) else exclude
    exclude = [each for each in patterns if select_names([*by_name, *values], (each,)) and _is_of(by_name, each)]
    new_names = map_names(select_names(list(by_name), only, exclude), rename)
    # The source's state tree refers to all its tensors by name, so it is kept only if none is left out or renamed.
    if not (only or exclude or rename):
        refused = {name: what for name, what in foreign.refused.items() if is_selected(name, exclude=patterns)}
        check_kept(refused, location)
        if foreign.skeleton is not None:
            kept = _without_values(foreign.skeleton, patterns, by_name) if patterns else foreign.skeleton
            return list(foreign.tensors), kept
    # A plain dict of tensors has no skeleton; only it is stored below `prefix`.
    parent_key = prefix if foreign.skeleton is None else ""
    full_names = {name: f"{parent_key}.{name}" if parent_key else name for name in new_names.values()}
    tensors = [replace(by_name[old], name=full_names[new]) for old, new in new_names.items()]
    leaves = flat_skeleton(full_names)
    return tensors, dict_skeleton({parent_key: leaves}) if parent_key else leaves


def value_paths(skeleton: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted paths of the values in a skeleton that are no tensors, those of dicts and lists included."""
    children = dict_parts(skeleton)
    plain = untyped(skeleton)
    if children is None:
        items = plain.get("$tuple") if isinstance(plain, dict) else plain
        children = dict(enumerate(items)) if isinstance(items, list) else {}
    if path and not (isinstance(plain, dict) and "$tensor" in plain):
        yield path
    for key, child in children.items():
        yield from value_paths(child, f"{path}.{key}" if path else str(key))


def _without_values(skeleton: Any, patterns: Collection[str], names: Collection[str], path: str = "") -> Any:
    """Return a skeleton without the values that patterns select; in a list or tuple, None takes their place.

    `path` is that of the value, with a dot at its end. Parts with tensors of `names` are kept.
    """

    def is_kept(key: Any, child: Any) -> bool:
        return _has_tensor(child, names) or is_selected(f"{path}{key}", exclude=patterns)

    def children(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        for key, child in items:
            yield key, _without_values(child, patterns, names, f"{path}{key}.") if is_kept(key, child) else None

    plain, parts = untyped(skeleton), dict_parts(skeleton)
    if parts is not None:
        kept = dict(children((key, child) for key, child in parts.items() if is_kept(key, child)))
        return typed_as(skeleton, dict_skeleton(kept))
    if isinstance(plain, list):
        return typed_as(skeleton, [child for _, child in children(enumerate(plain))])
    if isinstance(plain, dict) and isinstance(plain.get("$tuple"), list):
        return typed_as(skeleton, {"$tuple": [child for _, child in children(enumerate(plain["$tuple"]))]})
    return skeleton


def _has_tensor(skeleton: Any, names: Collection[str]) -> bool:
    if isinstance(skeleton, dict):
        return skeleton.get("$tensor") in names or any(_has_tensor(part, names) for part in skeleton.values())
    return isinstance(skeleton, list) and any(_has_tensor(part, names) for part in skeleton)


def _is_of(names: Iterable[str], pattern: str) -> bool:
    return any(not is_selected(name, exclude=(pattern,)) for name in names)


def check_arranged(tensors: Sequence[ForeignTensor], skeleton: Any, location: str) -> None:
    """Check that all tensors and the state can be stored, before anything is stored.

    Raises:
        ConfigError: a tensor has a dtype that is not supported, or the state cannot be stored.
        CorruptDataError: a name or the state is not valid.
    """
    for tensor in tensors:
        check_tensor_name(tensor.name, location)
        if tensor.dtype not in ITEM_BYTES:
            raise ConfigError(
                f"{location}: tensor {tensor.name!r} is {tensor.dtype}, which cannot be stored; leave it out with "
                "--exclude, or cast it"
            )
    _check_skeleton(skeleton, [tensor.name for tensor in tensors], location)


def _check_skeleton(skeleton: Any, names: Iterable[str], location: str) -> None:
    """Check that a state can be stored and restored, and has every tensor exactly once. Raise as `check_arranged`."""
    from torch.utils import _pytree as pytree

    placeholders = {name: object() for name in names}
    try:
        # `unflatten` puts any value into the tree, so placeholders can stand for the tensors.
        unflatten(skeleton, cast("Any", placeholders))
        # Count in the plain tree: pytree does not look into values of other types.
        tree = unflatten(skeleton, cast("Any", placeholders), named=False)
    except (ArithmeticError, CorruptDataError, RecursionError) as error:
        raise CorruptDataError(f"{location}: {error}") from error
    counts = Counter(map(id, pytree.tree_leaves(tree)))
    for name, placeholder in placeholders.items():
        count = counts[id(placeholder)]
        if count != 1:
            raise CorruptDataError(
                f"{location}: its state has tensor {name!r} {count_text(count, 'time')}; expected exactly once"
            )
    try:
        encode_state(skeleton)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{location}: its state cannot be stored: {error}") from error


def store_blocks(
    repository: Repository,
    tensors: Sequence[ForeignTensor],
    *,
    base: Sequence[TensorRecord] = (),
    codec: Codec = "delta",
    progress: Progress = NO_PROGRESS,
) -> StoredState:
    """Store foreign tensors in batches; memory holds at most two batches of 64 MiB, or one larger block."""
    blocks = (TensorBlock(tensor.name, start, block) for tensor in tensors for start, block in tensor.blocks())
    chunks: dict[str, list[Chunk]] = {tensor.name: [] for tensor in tensors}
    new_bytes, num_nonfinite = 0, Counter[str]()
    for batch in group_by_size(blocks, lambda block: block.tensor.nbytes, BATCH_BYTES):
        stored = store_chunks(repository.objects, batch, base=base, codec=codec, progress=progress)
        for name, chunk in stored.chunks:
            chunks[name].append(chunk)
        new_bytes += stored.new_bytes
        num_nonfinite.update(stored.num_nonfinite)
    records = tuple(join_chunks(tensor.name, tensor.dtype, tensor.shape, chunks[tensor.name]) for tensor in tensors)
    return StoredState(records, None, new_bytes, dict(num_nonfinite))
