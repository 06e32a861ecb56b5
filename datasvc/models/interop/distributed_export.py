"""Exports a version by all ranks of a job: each rank writes some of the safetensors files.

No rank holds the model: a rank reads the tensors of its files in groups, from the chunks that the ranks of a save
stored. The folder appears with the files of all ranks, or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from datasvc.errors import ConfigError
from datasvc.models.interop.exporting import (
    SHARD_BYTES,
    ModelExport,
    check_options,
    plan_files,
    select_part,
    select_weights,
    write_small_files,
    write_weights,
)
from datasvc.models.interop.whole_folder import create_folder
from datasvc.models.restoring.restore import read_version
from datasvc.models.saving.rank_channel import RankChannel, describe_error, open_channels, raise_on_all_ranks
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Repository

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

    Files are so small that each rank writes about as many bytes as the others, as far as whole tensors allow.

    Args:
        repository: repository of the version.
        ref: NAME, NAME@VERSION or NAME@TAG; rank 0 resolves it.
        folder: folder that all ranks see; must be empty or not exist.
        only: tensors to export; see `name_filter.select_names`.
        exclude: tensors to leave out.
        rename: new names; see `name_filter.map_names`.
        dtype: dtype to convert floating-point tensors to, such as "bfloat16"; None keeps their dtypes.
        max_shard_bytes: maximum size of the tensors in one file; a larger tensor gets its own file.
        group: torch.distributed group of the ranks; None: the default group, or this process alone if there is none.
        timeout_s: seconds that a rank waits for the others, which may have more to write.
        trusted_keys: see `restore.read_version`.
        progress: counts the bytes of each chunk that this rank read.

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
            temporary, version, error = None, None, None
            try:
                check_options(dtype, max_shard_bytes)
                if channel.rank == 0:
                    version = str(repository.resolve("models", ref))
                    temporary = str(opened.enter_context(create_folder(Path(folder))))
            except Exception as failure:  # noqa: BLE001 - raised on all ranks
                error = failure
            answers = _exchange(channel, [temporary, version], error)
            temporary, version = answers[0]
            target = Path(temporary)
            part, stored, files = None, None, {}
            try:
                _check_visible(target)
                stored = read_version(repository, version, trusted_keys=trusted_keys)
                only, rename = select_weights(stored.records, only, exclude, rename)
                part = select_part(repository, stored, only, exclude, rename, dtype, progress)
                files = plan_files(part.specs, min(max_shard_bytes, max(1, -(-part.num_bytes // channel.size))))
                own = {name: files[name] for name in sorted(files)[channel.rank :: channel.size]}
                progress.begin(sum(part.records[name].nbytes for names in own.values() for name in names))
                write_weights(target, part, own)
            except Exception as failure:  # noqa: BLE001 - raised on all ranks
                error = failure
            _exchange(channel, None, error)
            assert part is not None
            assert stored is not None
            try:
                if channel.rank == 0:
                    write_small_files(target, part, stored.entry, files)
                    written = sorted(file.name for file in target.iterdir())
                    opened.close()  # the folder appears
                else:
                    written = []
            except Exception as failure:  # noqa: BLE001 - raised on all ranks
                error = failure
            written = _exchange(channel, written, error)[0]
    finally:
        channel.close()
        # Not earlier: a rank that has connected would cut off those that still connect.
        other.close()
    paths = tuple(Path(folder) / name for name in written)
    return ModelExport(stored.version, "huggingface", paths, len(part.records), part.num_bytes)


def _check_visible(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"rank 0 created {folder}, which this rank does not see; name a folder on a shared disk")


def _exchange(channel: RankChannel, message: Any, error: Exception | None) -> list[Any]:
    """Return the messages of all ranks. Raises DatasvcError: a rank has an error."""
    answers = channel.exchange([describe_error(error), None if error else message])
    raise_on_all_ranks([answer[0] for answer in answers], error)
    return [answer[1] for answer in answers]
