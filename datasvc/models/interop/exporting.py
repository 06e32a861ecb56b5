"""Export model versions to file formats that can be read without datasvc.

The folder of an export is created atomically, with all its files. For safetensors and Hugging Face, memory does not
grow with the model: the tensors are loaded in groups.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from datasvc import durable
from datasvc.durable import is_plain_name
from datasvc.errors import ConfigError
from datasvc.models.interop import safetensors_files as safetensors
from datasvc.models.interop.dcp_folders import write_dcp_folder
from datasvc.models.interop.huggingface_folder import CONFIG_FILE
from datasvc.models.interop.torch_reader import CHECKPOINT_FILE, write_torch_file
from datasvc.models.interop.whole_folder import check_target, create_folder
from datasvc.models.restoring.fit import TensorSpec
from datasvc.models.restoring.load_into_module import spec_of
from datasvc.models.restoring.restore import StoredVersion, read_version
from datasvc.models.tensors.chunk_reader import ChunkSource
from datasvc.models.tensors.dtypes import cast
from datasvc.models.tensors.name_filter import is_below, map_names, select_names
from datasvc.models.tensors.read import load_tensors
from datasvc.models.tensors.state_tree import MAX_STATE_BYTES, decode_state, flatten, unflatten
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, Repository, Resolved
from datasvc.repository.objects.objects import parse_digest
from datasvc.sizes import group_by_size

if TYPE_CHECKING:
    import torch

    from datasvc.models.restoring.restore import Checkpoint

FORMATS: Final = ("safetensors", "huggingface", "torch", "dcp")
FLOATS: Final = ("float64", "float32", "float16", "bfloat16")
SHARD_BYTES: Final = 5_000_000_000
_MODEL: Final = "model"


@dataclass(frozen=True)
class ModelExport:
    """Result of an export; `files` are sorted by name, and `bytes` is the size of the exported tensors in memory."""

    version: Resolved
    format: str
    files: tuple[Path, ...]
    num_tensors: int
    bytes: int


@dataclass(frozen=True)
class ExportPart:
    """Tensors to export. Floating-point tensors are converted to `dtype`, unless it is None."""

    source: ChunkSource
    read: Callable[[Digest], bytes]  # reads a whole object of the version
    records: Mapping[str, TensorRecord]  # by new name
    dtype: str | None
    progress: Progress

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Dtypes and shapes of the exported tensors, by new name."""
        return {name: TensorSpec(self._dtype_of(record), record.shape) for name, record in self.records.items()}

    @property
    def num_bytes(self) -> int:
        """Size of the exported tensors in memory."""
        return sum(spec.nbytes for spec in self.specs.values())

    def load(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the tensors with these new names, in the dtype of the export; every byte is verified."""
        loaded = load_tensors(self.source, [self.records[name] for name in names], progress=self.progress)
        import torch  # after the error of `load_tensors` where it is not installed

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

    - "safetensors": `tensors.safetensors`, `state.json` with all other values, `entry.json`, and `state_types.json`
      if there are ordered dicts, named tuples or tied tensors. An import of this folder gives the same state.
    - "huggingface": `model.safetensors`, or several such files with an index; `config.json` and the other small files
      of an earlier import. By default, the tensors below `model` are written, without this prefix.
    - "torch": `checkpoint.pt`, for `torch.load(weights_only=True)`.
    - "dcp": a folder of torch.distributed.checkpoint.

    With `only`, `exclude` or `rename`, the state is a dict of tensors. "torch" and "dcp" hold the model in memory.

    Args:
        repository: repository of the version.
        ref: NAME, NAME@VERSION or NAME@TAG.
        folder: local folder; must be empty or not exist.
        format: one of `FORMATS`.
        only: tensors to export; see `name_filter.select_names`.
        exclude: tensors to leave out.
        rename: new names; see `name_filter.map_names`.
        dtype: dtype to convert floating-point tensors to, such as "bfloat16"; None keeps their dtypes.
        max_shard_bytes: maximum size of the tensors in one file of "huggingface"; a larger tensor gets its own file.
        source: source of the chunks, by default the repository.
        trusted_keys: see `restore.read_version`.
        progress: counts the bytes of each chunk that was read.

    Raises:
        ConfigError: an argument or the folder is not valid, or the format does not support a tensor.
        NotFoundError, CorruptDataError, UnavailableError: see `load_tensors`, or the disk is full. No file remains.
    """
    if format not in FORMATS:
        raise ConfigError(f"{format!r} is not a supported format; expected one of: {', '.join(FORMATS)}")
    check_options(dtype, max_shard_bytes)
    check_target(Path(folder))
    stored = read_version(repository, ref, trusted_keys=trusted_keys)
    if format == "huggingface":
        only, rename = select_weights(stored.records, only, exclude, rename)
    part = select_part(repository, stored, only, exclude, rename, dtype, progress, source=source)
    # The state tree needs all tensors under their stored names. Otherwise the exported state is a flat dict.
    is_tree = not (only or exclude or rename)
    progress.begin(sum(record.nbytes for record in part.records.values()))
    target = Path(folder)
    with create_folder(target) as temporary:
        if format == "huggingface":
            files_to_write = plan_files(part.specs, max_shard_bytes)
            write_weights(temporary, part, files_to_write)
            write_small_files(temporary, part, stored.entry, files_to_write)
        else:
            _write_state(repository, temporary, format, part, stored, is_tree=is_tree)
        files = tuple(target / file.name for file in sorted(temporary.iterdir()))
    return ModelExport(stored.version, format, files, len(part.records), part.num_bytes)


def _write_state(
    repository: Repository, folder: Path, file_format: str, part: ExportPart, stored: StoredVersion, *, is_tree: bool
) -> None:
    """Write a state tree or a dict of tensors, in a format other than "huggingface"."""
    skeleton = None
    if is_tree:
        skeleton = decode_state(repository.objects.read(stored.state, MAX_STATE_BYTES), str(stored.version))
    if file_format == "safetensors":
        safetensors.write_checkpoint(folder, part.specs, part.load, skeleton, stored.entry)
        return
    tensors = part.load(list(part.records))
    # Plain tuples: `torch.load(weights_only=True)` refuses classes of the program that saved.
    state = tensors if skeleton is None else unflatten(skeleton, tensors, named=False)
    if file_format == "torch":
        write_torch_file(folder / CHECKPOINT_FILE, state)
    else:
        write_dcp_folder(folder, state)


def check_options(dtype: str | None, max_shard_bytes: int) -> None:
    """Raise ConfigError if the dtype or the size of a file is not valid for an export."""
    if dtype is not None and dtype not in FLOATS:
        raise ConfigError(f"{dtype!r} is not a floating-point dtype; expected one of: {', '.join(FLOATS)}")
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes is {max_shard_bytes}; expected 1 or more")


def select_part(
    repository: Repository,
    stored: StoredVersion,
    only: Collection[str],
    exclude: Collection[str],
    rename: Mapping[str, str] | None,
    dtype: str | None,
    progress: Progress,
    *,
    source: ChunkSource | None = None,
) -> ExportPart:
    """Return the tensors of a version to export, see `export_model`. Raises ConfigError: a pattern does not fit."""
    records = {record.name: record for record in stored.records}
    new_names = map_names(select_names(list(records), only, exclude), rename)
    chosen = {
        new_names[name]: replace(record, name=new_names[name])
        for name, record in records.items()
        if name in new_names
    }
    return ExportPart(source or repository.objects, repository.objects.read, chosen, dtype, progress)


def export_checkpoint(checkpoint: Checkpoint, folder: Path) -> list[Path]:
    """Write a restored checkpoint as `export_model` writes "safetensors", with the same errors.

    Returns:
        The paths of `tensors.safetensors`, `state.json`, `entry.json`, and of `state_types.json` if there is one.
    """
    skeleton, tensors = flatten(checkpoint.state)
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}

    def load(names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: tensors[name].detach().cpu() for name in names}

    with create_folder(folder) as temporary:
        safetensors.write_checkpoint(temporary, specs, load, skeleton, checkpoint.entry)
    return [folder / name for name in safetensors.CHECKPOINT_FILES if (folder / name).exists()]


def select_weights(
    records: Sequence[TensorRecord], only: Collection[str], exclude: Collection[str], rename: Mapping[str, str] | None
) -> tuple[Collection[str], Mapping[str, str] | None]:
    """Return `only` and `rename` with their defaults for "huggingface".

    If there are tensors below `model`, an empty `only` selects these, and an empty `rename` removes this prefix.
    """
    names = [record.name for record in records]
    if not only and any(is_below(name, _MODEL) for name in names):
        only = [_MODEL]
    chosen = select_names(names, only, exclude)
    # Keep the prefix if a tensor has the name `model` itself: its new name would be empty.
    if not rename and chosen and all(is_below(name, _MODEL) and name != _MODEL for name in chosen):
        rename = {_MODEL: ""}
    return only, rename


def plan_files(specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> dict[str, list[str]]:
    """Return the names of the tensors in each file of a folder in Hugging Face's layout, by file name."""
    groups = list(group_by_size(specs, lambda name: specs[name].nbytes, max_shard_bytes))
    if not groups:
        groups = [[]]  # a model without tensors is one file too
    if len(groups) == 1:
        return {f"model{safetensors.SUFFIX}": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}{safetensors.SUFFIX}": group
        for number, group in enumerate(groups, start=1)
    }


def write_weights(folder: Path, part: ExportPart, files: Mapping[str, Sequence[str]]) -> None:
    """Write safetensors files; `files` has the names of their tensors by file name."""
    specs = part.specs
    for name, names in files.items():
        safetensors.write_safetensors(folder / name, {tensor: specs[tensor] for tensor in names}, part.load)


def write_small_files(
    folder: Path, part: ExportPart, entry: Mapping[str, Any], files: Mapping[str, Sequence[str]]
) -> None:
    """Write what a folder in Hugging Face's layout has beside the files of `write_weights`, such as the index."""
    if len(files) > 1:
        safetensors.write_index(folder, files, part.num_bytes)
    imported_files = _imported_files(entry)
    # transformers builds the model from `config.json`.
    config = _config_content(part, entry, imported_files.get(CONFIG_FILE))
    if config is not None:
        durable.write_file(folder / CONFIG_FILE, config)
    else:
        warnings.warn(
            "no config.json was written, because the version was saved without a configuration that has model_type: "
            'AutoModel cannot build the model from this folder. Save with config={"huggingface": '
            "model.config.to_dict()}, or copy the config.json of the model into the folder",
            stacklevel=2,
        )
    for name, digest in imported_files.items():
        # The entry may come from another repository, so a name may be hostile: write only new files in the folder.
        if is_plain_name(name) and not (folder / name).exists():
            durable.write_file(folder / name, part.read(digest))


def _imported_files(entry: Mapping[str, Any]) -> dict[str, Digest]:
    """Return the digests of the small files that the import of the version stored, by name."""
    imported = entry.get("imported")
    files = imported.get("files") if isinstance(imported, Mapping) else None
    return {name: parse_digest(str(digest)) for name, digest in files.items()} if isinstance(files, Mapping) else {}


def _config_content(part: ExportPart, entry: Mapping[str, Any], digest: Digest | None) -> bytes | None:
    """Return the content of `config.json`, with the dtype of this export; None if the version has no configuration.

    The content is the file `digest`, which an earlier import stored. Without such a file, it is what the version was
    saved with, see `_saved_config`.
    """
    raw: bytes | None = None
    if digest is not None:
        raw = part.read(digest)
        if part.dtype is None:
            return raw
        try:
            config = json.loads(raw)
        except (ValueError, RecursionError):
            return raw  # the import accepts files that are not valid JSON, so export the same bytes
    else:
        config = _saved_config(entry.get("config"))
    if not isinstance(config, dict):
        return raw
    # The key is `torch_dtype` before release 5 of transformers, and `dtype` since.
    dtypes = {name: part.dtype for name in ("torch_dtype", "dtype") if name in config and part.dtype is not None}
    return (json.dumps({**config, **dtypes}, indent=2, sort_keys=True) + "\n").encode()


def _saved_config(config: object) -> dict[str, Any] | None:
    """Return the configuration of a transformers model in that of a version; None if there is none.

    It is the value of "huggingface", or else the first that has `model_type`: all of it, or the value of a key.
    """
    if not isinstance(config, dict):
        return None
    if isinstance(own := config.get("huggingface"), dict):
        return own
    values = (config, *config.values())
    return next((each for each in values if isinstance(each, dict) and isinstance(each.get("model_type"), str)), None)
