"""Model versions out again, as files that need no datasvc; a folder is there with all its files, or not at all."""

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
from datasvc.models.interop.whole_folder import check_target, filling
from datasvc.models.restoring.fit import TensorSpec
from datasvc.models.restoring.stored_version import read_version
from datasvc.models.tensors.chunk_reader import ChunkSource
from datasvc.models.tensors.dtypes import cast
from datasvc.models.tensors.name_filter import is_below, map_names, select_names
from datasvc.models.tensors.read import load_tensors
from datasvc.models.tensors.state_tree import MAX_STATE_BYTES, decode_state, unflatten
from datasvc.models.tensors.tensor_table import TensorRecord
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
    """What an export wrote.

    Attributes:
        version: that was exported.
        format: as which.
        files: in the folder, by name.
        num_tensors: in them.
        bytes: of these tensors.
    """

    version: Resolved
    format: str
    files: tuple[Path, ...]
    num_tensors: int
    bytes: int


@dataclass(frozen=True)
class _ExportPart:
    """The tensors of an export: `records` by the names that they get; `read` gives whole objects of the version."""

    source: ChunkSource
    read: Callable[[Digest], bytes]
    records: Mapping[str, TensorRecord]
    dtype: str | None
    report: Callable[[int], None] | None

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(self._dtype_of(record), record.shape) for name, record in self.records.items()}

    def load(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return tensors, every byte verified, in the dtype that they are exported in."""
        import torch

        loaded = load_tensors(self.source, [self.records[name] for name in names], report=self.report)
        wanted = {name: getattr(torch, self._dtype_of(self.records[name])) for name in names}
        return {name: cast(name, tensor, wanted[name]) for name, tensor in loaded.items()}

    def _dtype_of(self, record: TensorRecord) -> str:
        return self.dtype if self.dtype and record.dtype in FLOATS else record.dtype


def export_model(
    repository: Repository,
    ref: str,
    folder: str | Path,
    format: str = "safetensors",  # noqa: A002 - what everybody calls it
    *,
    only: Collection[str] = (),
    exclude: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    source: ChunkSource | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
    begin: Callable[[int], None] | None = None,
    report: Callable[[int], None] | None = None,
) -> ModelExport:
    """Write a version, every byte verified, as files of another format.

    - "safetensors": `tensors.safetensors` with all tensors, `state.json` with all other values, `entry.json`.
      Imported again it gives the same state.
    - "huggingface": the tensors below `model`, without this prefix, as `model.safetensors` or shards with an index;
      and the `config.json` that came with an import.
    - "torch": `checkpoint.pt`, which `torch.load(weights_only=True)` reads.
    - "dcp": a folder of torch.distributed.checkpoint.

    Where only a part is asked for, or other names, the state is a dict of tensors by name. safetensors are written
    in memory that does not grow with the model; the others hold all of it.

    Args:
        repository: where the version is.
        ref: NAME, NAME@VERSION or NAME@TAG.
        folder: new or empty, local.
        format: one of `FORMATS`.
        only: which tensors; see `name_filter.select_names`.
        exclude: which not.
        rename: what they shall be called; see `name_filter.map_names`.
        dtype: "float32", "bfloat16", ...: what floating-point tensors become.
        max_shard_bytes: of "huggingface": no file holds more bytes of tensors, except for one larger tensor.
        source: of the tensors' bytes, default the repository.
        trusted_keys: as of `stored_version.read_version`.
        begin: called once with the bytes to come.
        report: called with the bytes of each chunk that is there, from any thread.

    Raises:
        ConfigError: the folder is not empty or may not be written; the format cannot hold a tensor; or what
            `selection` and `Repository.resolve` raise. Nothing was written.
        NotFoundError, CorruptDataError: see `load_tensors`; nothing is left.
        UnavailableError: a store did not answer, or the disk is full; nothing is left.
    """
    if format not in FORMATS:
        raise ConfigError(f"no format {format!r}; there are: {', '.join(FORMATS)}")
    if dtype is not None and dtype not in FLOATS:
        raise ConfigError(f"{dtype!r} is no floating-point dtype to export in; there are: {', '.join(FLOATS)}")
    if max_shard_bytes < 1:
        raise ConfigError(f"a file of {max_shard_bytes} bytes can hold nothing")
    check_target(Path(folder))
    stored = read_version(repository, ref, trusted_keys=trusted_keys)
    records = stored.records
    if format == "huggingface":
        only, rename = weights_only(records, only, exclude, rename)
    mapped = map_names(select_names([record.name for record in records], only, exclude), rename)
    chosen = {mapped[each.name]: replace(each, name=mapped[each.name]) for each in records if each.name in mapped}
    part = _ExportPart(source or repository.objects, repository.objects.read, chosen, dtype, report)
    skeleton = None
    if not (only or exclude or rename):
        skeleton = decode_state(repository.objects.read(stored.state, MAX_STATE_BYTES), str(stored.version))
    if begin is not None:
        begin(sum(record.nbytes for record in chosen.values()))
    target = Path(folder)
    with filling(target) as temporary:
        _WRITERS[format](temporary, part, skeleton, stored.entry, max_shard_bytes)
        files = tuple(target / file.name for file in sorted(temporary.iterdir()))
    return ModelExport(stored.version, format, files, len(chosen), sum(spec.nbytes for spec in part.specs.values()))


def weights_only(
    records: Sequence[TensorRecord], only: Collection[str], exclude: Collection[str], rename: Mapping[str, str] | None
) -> tuple[Collection[str], Mapping[str, str] | None]:
    """Return the selection of the model's own tensors, by their own names, where none is given."""
    names = [record.name for record in records]
    if not only and any(is_below(name, _MODEL) for name in names):
        only = [_MODEL]
    chosen = select_names(names, only, exclude)
    if not rename and chosen and all(is_below(name, _MODEL) and name != _MODEL for name in chosen):
        rename = {_MODEL: ""}
    return only, rename


def plan_files(specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> dict[str, list[str]]:
    """Return which tensors go into which file of a folder in Hugging Face's layout."""
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
        safetensors.write_safetensors(folder / name, {each: specs[each] for each in names}, part.load)
    if len(files) > 1:
        safetensors.write_index(folder, files, sum(spec.nbytes for spec in specs.values()))
    config = _config(part, entry)
    if config is not None:
        durable.write_file(folder / safetensors.CONFIG_FILE, config)


def _config(part: _ExportPart, entry: Mapping[str, Any]) -> bytes | None:
    """Return the `config.json` that came with an import, as it was but for the dtype that is asked for."""
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
    # Its name was torch_dtype before transformers 5.
    told = {name: part.dtype for name in ("torch_dtype", "dtype") if name in config and part.dtype is not None}
    return (json.dumps({**config, **told}, indent=2, sort_keys=True) + "\n").encode()


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
