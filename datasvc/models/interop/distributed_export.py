"""Exports a version by all ranks of a job: each rank writes some of the safetensors files.

No rank holds the model: a rank reads the tensors of its files in groups, from the chunks that the ranks of a save
stored. The folder appears with the files of all ranks, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from datasvc.errors import ConfigError
from datasvc.models.interop.exporting import (
    SHARD_BYTES,
    ExportPart,
    ModelExport,
    check_options,
    plan_files,
    select_part,
    select_weights,
    write_small_files,
    write_weights,
)
from datasvc.models.interop.whole_folder import create_folder
from datasvc.models.restoring.restore import StoredVersion, read_version
from datasvc.models.saving.rank_channel import RankChannel, describe_error, open_channels, raise_on_all_ranks
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Repository

T = TypeVar("T")

_TIMEOUT_S: Final = 1800.0


def export_distributed(
    repository: Repository,
    ref: str,
    folder: str | Path,
    *,
    only: Collection[str] = (),
    exclude: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    group: Any = None,
    timeout_s: float = _TIMEOUT_S,
    trusted_keys: Sequence[str | Path] | None = None,
    progress: Progress = NO_PROGRESS,
) -> ModelExport:
    """Write a version in Hugging Face's layout, see `export_model`, divided among the ranks. Every rank calls this.

    Files are so small that each rank writes about as many bytes as the others, as far as whole tensors allow. Rank 0
    resolves `ref`. All ranks see `folder`, which must be empty or not exist. `group` is the torch.distributed group
    of the ranks; None: the default group, or this process alone if there is none. A rank waits `timeout_s` seconds
    for the others, which may have more to write. `progress` counts the bytes of each chunk that this rank read. For
    the other arguments see `export_model`.

    Returns:
        The same on every rank: all files of the folder.

    Raises:
        ConfigError: see `export_model`; or a rank does not see the folder that rank 0 has created.
        DatasvcError: a rank failed, see `export_model`. Nothing was written, and all ranks raise the same.
        UnavailableError: a rank is lost.
    """
    channel, other = open_channels(group, timeout_s)
    try:
        with ExitStack() as opened:

            def create() -> tuple[str, str] | None:
                check_options(dtype, max_shard_bytes)
                if channel.rank != 0:
                    return None
                version = str(repository.resolve("models", ref))
                return version, str(opened.enter_context(create_folder(Path(folder))))

            version, temporary = _together(channel, create, sends=True)[1]
            target = Path(temporary)

            def write() -> tuple[StoredVersion, ExportPart, dict[str, list[str]]]:
                _check_visible(target)
                stored = read_version(repository, version, trusted_keys=trusted_keys)
                chosen, names = select_weights(stored.records, only, exclude, rename)
                part = select_part(repository, stored, chosen, exclude, names, dtype, progress)
                return stored, part, _write_own_files(channel, target, part, max_shard_bytes)

            (stored, part, files), _ = _together(channel, write)
            _, written = _together(channel, lambda: _finish(channel, opened, target, part, stored, files), sends=True)
    finally:
        channel.close()
        # Not earlier: a rank that has connected would cut off those that still connect.
        other.close()
    paths = tuple(Path(folder) / name for name in written)
    return ModelExport(stored.version, "huggingface", paths, len(part.records), part.num_bytes)


def _write_own_files(
    channel: RankChannel, folder: Path, part: ExportPart, max_shard_bytes: int
) -> dict[str, list[str]]:
    """Write the files of this rank; return the names of the tensors in each file of all ranks."""
    files = plan_files(part.specs, min(max_shard_bytes, max(1, -(-part.num_bytes // channel.size))))
    own = {name: files[name] for name in sorted(files)[channel.rank :: channel.size]}
    part.progress.begin(sum(part.records[name].nbytes for names in own.values() for name in names))
    write_weights(folder, part, own)
    return files


def _finish(
    channel: RankChannel,
    opened: ExitStack,
    folder: Path,
    part: ExportPart,
    stored: StoredVersion,
    files: Mapping[str, Sequence[str]],
) -> list[str]:
    """Let the folder appear, with its small files; return the names of all files. Does nothing but on rank 0."""
    if channel.rank != 0:
        return []
    write_small_files(folder, part, stored.entry, files)
    written = sorted(file.name for file in folder.iterdir())
    opened.close()
    return written


def _check_visible(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"rank 0 created {folder}, which this rank does not see; name a folder on a shared disk")


def _together(channel: RankChannel, function: Callable[[], T], *, sends: bool = False) -> tuple[T, Any]:
    """Call a function on all ranks; return the result of this rank, and that of rank 0 if ranks send theirs as JSON.

    Raises:
        DatasvcError: the function failed on a rank.
    """
    result, error = None, None
    try:
        result = function()
    except Exception as failure:  # noqa: BLE001 - raised on all ranks below
        error = failure
    answers = channel.exchange([describe_error(error), result if sends else None])
    raise_on_all_ranks([answer[0] for answer in answers], error)
    return cast("T", result), answers[0][1]
