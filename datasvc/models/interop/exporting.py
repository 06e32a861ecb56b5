"""Export model versions to file formats that can be read without datasvc. The folder is created atomically."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from datasvc import durable
from datasvc.errors import ConfigError
from datasvc.models.interop import safetensors_files as safetensors
from datasvc.models.interop.dcp_folders import write_dcp_folder
from datasvc.models.interop.torch_files import CHECKPOINT_FILE, write_torch_file
from datasvc.models.interop.whole_folder import check_target, create_folder
from datasvc.models.restoring.fit import TensorSpec
from datasvc.models.restoring.stored_version import read_version
from datasvc.models.tensors.chunk_reader import ChunkSource
from datasvc.models.tensors.dtypes import cast
from datasvc.models.tensors.name_filter import is_below, map_names, select_names
from datasvc.models.tensors.read import load_tensors
from datasvc.models.tensors.state_tree import MAX_STATE_BYTES, decode_state, unflatten
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, Repository, Resolved
from datasvc.repository.objects.objects import parse_digest

if TYPE_CHECKING:
    import torch

FORMATS: Final = ("safetensors", "huggingface", "torch", "dcp")
FLOATS: Final = ("float64", "float32", "float16", "bfloat16")
SHARD_BYTES: Final = 5_000_000_000
_MODEL: Final = "model"


@dataclass(frozen=True)
class ModelExport:
    """Result of an export.

    Attributes:
        version: version that was exported.
        format: format of the files, one of `FORMATS`.
        files: paths of the files, sorted by name.
        num_tensors: number of tensors.
        bytes: size of these tensors.
    """

    version: Resolved
    format: str
    files: tuple[Path, ...]
    num_tensors: int
    bytes: int


@dataclass(frozen=True)
class _ExportPart:
    """Tensors to export.

    Attributes:
        source: source of the chunks.
        read: function that reads a whole object of the version.
        records: records by the new names of the tensors.
        dtype: dtype for floating-point tensors; None keeps theirs.
        progress: counts the bytes of each chunk that was read.
    """

    source: ChunkSource
    read: Callable[[Digest], bytes]
    records: Mapping[str, TensorRecord]
    dtype: str | None
    progress: Progress

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(self._dtype_of(record), record.shape) for name, record in self.records.items()}

    def load(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return tensors in the dtype of the export; every byte is verified."""
        import torch

        loaded = load_tensors(self.source, [self.records[name] for name in names], progress=self.progress)
        dtypes = {name: getattr(torch, self._dtype_of(self.records[name])) for name in names}
        return {name: cast(name, tensor, dtypes[name]) for name, tensor in loaded.items()}

    def _dtype_of(self, record: TensorRecord) -> str:
        return self.dtype if self.dtype and record.dtype in FLOATS else record.dtype


def export_model(
    repository: Repository,
    ref: str,
    folder: str | Path,
    format: str = "safetensors",  # noqa: A002 - the usual name of this argument
    *,
    only: Collection[str] = (),
    exclude: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    source: ChunkSource | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
    progress: Progress = NO_PROGRESS,
) -> ModelExport:
    """Write a version as files of another format; every byte is verified.

    - "safetensors": `tensors.safetensors` with all tensors, `state.json` with all other values, and `entry.json`.
      An import of this folder gives the same state.
    - "huggingface": the tensors below `model`, without this prefix, as `model.safetensors` or as shards with an
      index, and the `config.json` of an earlier import.
    - "torch": `checkpoint.pt`, for `torch.load(weights_only=True)`.
    - "dcp": a folder of torch.distributed.checkpoint.

    With `only`, `exclude` or `rename`, the exported state is a dict of tensors by name. For safetensors and Hugging
    Face, memory does not grow with the model; the other formats hold the whole model in memory.

    Args:
        repository: repository of the version.
        ref: NAME, NAME@VERSION or NAME@TAG.
        folder: local folder; must be empty or not exist.
        format: one of `FORMATS`.
        only: tensors to export; see `name_filter.select_names`.
        exclude: tensors to leave out.
        rename: new names; see `name_filter.map_names`.
        dtype: dtype to convert floating-point tensors to, such as "bfloat16"; None keeps theirs.
        max_shard_bytes: largest size of the tensors in one file of "huggingface"; a larger tensor gets its own file.
        source: source of the chunks, by default the repository.
        trusted_keys: see `stored_version.read_version`.
        progress: counts the bytes of each chunk that was read.

    Raises:
        ConfigError: an argument is not valid, the folder is not empty or not writable, or the format does not support
            a tensor. Nothing was written.
        NotFoundError, CorruptDataError: see `load_tensors`. Nothing was written.
        UnavailableError: a store does not answer, or the disk is full. Nothing was written.
    """
    if format not in FORMATS:
        raise ConfigError(f"{format!r} is not a supported format; expected one of: {', '.join(FORMATS)}")
    if dtype is not None and dtype not in FLOATS:
        raise ConfigError(f"{dtype!r} is not a floating-point dtype; expected one of: {', '.join(FLOATS)}")
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes is {max_shard_bytes}; expected 1 or more")
    check_target(Path(folder))
    stored = read_version(repository, ref, trusted_keys=trusted_keys)
    records = stored.records
    if format == "huggingface":
        only, rename = weights_only(records, only, exclude, rename)
    mapped = map_names(select_names([record.name for record in records], only, exclude), rename)
    chosen = {
        mapped[record.name]: replace(record, name=mapped[record.name]) for record in records if record.name in mapped
    }
    part = _ExportPart(source or repository.objects, repository.objects.read, chosen, dtype, progress)
    skeleton = None
    # The stored state tree fits only an unchanged set of tensors.
    if not (only or exclude or rename):
        skeleton = decode_state(repository.objects.read(stored.state, MAX_STATE_BYTES), str(stored.version))
    progress.begin(sum(record.nbytes for record in chosen.values()))
    target = Path(folder)
    with create_folder(target) as temporary:
        _WRITERS[format](temporary, part, skeleton, stored.entry, max_shard_bytes)
        files = tuple(target / file.name for file in sorted(temporary.iterdir()))
    return ModelExport(stored.version, format, files, len(chosen), sum(spec.nbytes for spec in part.specs.values()))


def weights_only(
    records: Sequence[TensorRecord], only: Collection[str], exclude: Collection[str], rename: Mapping[str, str] | None
) -> tuple[Collection[str], Mapping[str, str] | None]:
    """Return `only` and `rename`; by default they select the tensors below `model` and remove this prefix."""
    names = [record.name for record in records]
    if not only and any(is_below(name, _MODEL) for name in names):
        only = [_MODEL]
    chosen = select_names(names, only, exclude)
    if not rename and chosen and all(is_below(name, _MODEL) and name != _MODEL for name in chosen):
        rename = {_MODEL: ""}
    return only, rename


def plan_files(specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> dict[str, list[str]]:
    """Return the names of the tensors in each file of a folder in Hugging Face's layout."""
    groups = list(safetensors.group_names(specs, specs, max_shard_bytes)) or [[]]
    if len(groups) == 1:
        return {f"model{safetensors.SUFFIX}": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}{safetensors.SUFFIX}": group
        for number, group in enumerate(groups, start=1)
    }


def _write_safetensors(folder: Path, part: _ExportPart, skeleton: Any, entry: Mapping[str, Any], _shard: int) -> None:
    safetensors.write_checkpoint(folder, part.specs, part.load, skeleton, entry)


def _write_huggingface(folder: Path, part: _ExportPart, _skeleton: Any, entry: Mapping[str, Any], shard: int) -> None:
    specs = part.specs
    files = plan_files(specs, shard)
    for name, names in files.items():
        safetensors.write_safetensors(folder / name, {tensor: specs[tensor] for tensor in names}, part.load)
    if len(files) > 1:
        safetensors.write_index(folder, files, sum(spec.nbytes for spec in specs.values()))
    config = _config(part, entry)
    if config is not None:
        durable.write_file(folder / safetensors.CONFIG_FILE, config)


def _config(part: _ExportPart, entry: Mapping[str, Any]) -> bytes | None:
    """Return the `config.json` of an earlier import, with the dtype of this export; None if there was none."""
    imported = entry.get("imported")
    files = imported.get("files") if isinstance(imported, Mapping) else None
    digest = files.get(safetensors.CONFIG_FILE) if isinstance(files, Mapping) else None
    if digest is not None:
        raw = part.read(parse_digest(str(digest)))
        if part.dtype is None:
            return raw
        try:
            config = json.loads(raw)
        except (ValueError, RecursionError):
            return raw
    else:
        config = entry.get("config", {}).get("huggingface")
    if not isinstance(config, dict):
        return None if digest is None else raw
    # The key is `torch_dtype` before transformers 5, and `dtype` since.
    dtypes = {name: part.dtype for name in ("torch_dtype", "dtype") if name in config and part.dtype is not None}
    return (json.dumps({**config, **dtypes}, indent=2, sort_keys=True) + "\n").encode()


def _write_torch(folder: Path, part: _ExportPart, skeleton: Any, _entry: Mapping[str, Any], _shard: int) -> None:
    write_torch_file(folder / CHECKPOINT_FILE, _state(part, skeleton))


def _write_dcp(folder: Path, part: _ExportPart, skeleton: Any, _entry: Mapping[str, Any], _shard: int) -> None:
    write_dcp_folder(folder, _state(part, skeleton))


_WRITERS: Final[Mapping[str, Callable[[Path, _ExportPart, Any, Mapping[str, Any], int], None]]] = {
    "safetensors": _write_safetensors,
    "huggingface": _write_huggingface,
    "torch": _write_torch,
    "dcp": _write_dcp,
}


def _state(part: _ExportPart, skeleton: Any) -> Any:
    tensors = part.load(list(part.records))
    return tensors if skeleton is None else unflatten(skeleton, tensors)
