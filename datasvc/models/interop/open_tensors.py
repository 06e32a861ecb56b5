"""Reads tensors of a model version where they are stored, by the methods of an open safetensors file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from datasvc.cache import Cache
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError, NotFoundError
from datasvc.models.interop.safetensors_header import NAMES
from datasvc.models.restoring.copies import StoredCopies
from datasvc.models.restoring.load_into_module import names_below
from datasvc.models.restoring.restore import read_version
from datasvc.models.tensors.chunk_reader import ChunkSource
from datasvc.models.tensors.read import load_window
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.repository import Repository, Resolved

if TYPE_CHECKING:
    import torch


class OpenTensors:
    """Tensors of a version, for code that reads safetensors files: it has the methods of `safetensors.safe_open`.

    No tensor is read before it is asked for; what is read is verified. Nothing stays open, and any number of threads
    may read. `repo.models.open_safetensors` makes one.

    Args:
        copies: where the version is read from.
        version: name and number of the version.
        records: its tensors, by the names of this object.
        device: device of the tensors that are returned, as `torch.Tensor.to` takes it.
    """

    def __init__(
        self, copies: StoredCopies, version: Resolved, records: Mapping[str, TensorRecord], device: Any
    ) -> None:
        self.version = version
        self._copies, self._records, self._device = copies, dict(records), device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __repr__(self) -> str:
        return f"OpenTensors({self.version}, {len(self._records)} tensors)"

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._records)

    def offset_keys(self) -> list[str]:
        """Return the names in the order in which the version lists them."""
        return list(self._records)

    def metadata(self) -> dict[str, str]:
        """Return texts about the tensors: their format, "pt", and the version."""
        return {"format": "pt", "version": str(self.version)}

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, owned by the caller. For errors see `get_tensors`."""
        return self.get_tensors([name])[name]

    def get_tensors(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Return several tensors by name, read in parallel; None: all of them.

        Raises:
            NotFoundError: the version has no tensor of a name, or an object is missing.
            ConfigError, CorruptDataError, UnavailableError: see `load_tensors`.
        """
        chosen = list(self._records) if names is None else list(names)
        loaded = self._copies.load([self._record(name) for name in chosen])
        return {name: tensor.to(self._device) for name, tensor in loaded.items()}

    def get_slice(self, name: str) -> TensorSlice:
        """Return a tensor of which only a part is read: `get_slice("w")[:, 8:16]`, from the repository.

        Raises:
            NotFoundError: the version has no tensor of this name.
        """
        return TensorSlice(self._copies.direct, self._record(name), self._device)

    def _record(self, name: str) -> TensorRecord:
        if name not in self._records:
            raise NotFoundError(f"{self.version} has no tensor {name!r}; `keys()` has those that it has")
        return self._records[name]


class TensorSlice:
    """A tensor of which an index reads only the chunks that it needs."""

    def __init__(self, source: ChunkSource, record: TensorRecord, device: Any) -> None:
        self._source, self._record, self._device = source, record, device

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._record.shape)

    def get_dtype(self) -> str:
        """Return the dtype as safetensors names it, such as "BF16"; of others, the name of torch."""
        return NAMES.get(self._record.dtype, self._record.dtype)

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Return a part of the tensor, owned by the caller.

        Args:
            key: integers, slices with steps above 0 and one `...`, as of a tensor.

        Raises:
            IndexError: the tensor has fewer dimensions, or a dimension is shorter.
            ConfigError, CorruptDataError, NotFoundError, UnavailableError: see `load_window`.
        """
        start, shape, rest = _split_key(key, self._record.shape)
        # A copy where steps leave elements out, so that these do not stay in memory.
        return load_window(self._source, self._record, start, shape)[rest].contiguous().to(self._device)


def open_safetensors(
    repository: Repository,
    ref: str | Resolved,
    *,
    prefix: str = "model",
    rename: Mapping[str, str] | None = None,
    device: str | int | torch.device = "cpu",
    cache: Cache | str | Path | None = None,
    peers: Peers | None = None,
    fallback: Sequence[Repository | str] | Repository | str = (),
    trusted_keys: Sequence[str | Path] | None = None,
) -> OpenTensors:
    """Open a version like a safetensors file, for code that reads weights with `safe_open`; no file is written.

    ```python
    with repo.models.open_safetensors("gpt@prod") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}
        rows = file.get_slice("embedding.weight")[rank * 1000 : (rank + 1) * 1000]
    ```

    Args:
        repository: repository of the version.
        ref: NAME, NAME@VERSION or NAME@TAG.
        prefix: part of the state whose tensors are read, without this prefix in their names; "": all.
        rename: new names; see `name_filter.map_names`.
        device: device of the tensors.
        cache: see `restore.restore`; slices are read without it.
        peers: see `restore.restore`.
        fallback: see `restore.restore`.
        trusted_keys: see `restore.restore`.

    Raises:
        ConfigError, NotFoundError, CorruptDataError, UnavailableError: see `read_version`.
    """
    copies = StoredCopies(repository, cache=cache, peers=peers, fallback=fallback)
    stored = read_version(repository, ref, read=copies.direct.read, trusted_keys=trusted_keys)
    records = {record.name: record for record in stored.records}
    names = names_below(records, prefix, rename)
    renamed = {name: replace(records[stored_name], name=name) for stored_name, name in names.items()}
    return OpenTensors(copies, stored.version, renamed, device)


def _is_index(part: Any) -> bool:
    # An array and a boolean have `__index__` too, and mean something else.
    is_number = hasattr(part, "__index__") and not isinstance(part, bool) and not getattr(part, "shape", ())
    return part is ... or isinstance(part, slice) or is_number


def _split_key(key: Any, shape: Sequence[int]) -> tuple[list[int], tuple[int, ...], tuple[Any, ...]]:
    """Return the first element and the shape of the block that has what a key selects, and the key in the block."""
    keys = key if isinstance(key, tuple) else (key,)
    if sum(part is ... for part in keys) > 1 or not all(map(_is_index, keys)):
        raise ConfigError(f"{key!r} is no index of a stored tensor; give integers, slices and one '...'")
    missing = len(shape) - sum(part is not ... for part in keys)
    if missing < 0:
        raise IndexError(f"{key!r} has more dimensions than the tensor, of shape {tuple(shape)}")
    at = next((number for number, part in enumerate(keys) if part is ...), len(keys))
    whole = [*keys[:at], *[slice(None)] * missing, *keys[at + 1 :]]
    start: list[int] = []
    sizes: list[int] = []
    rest: list[int | slice] = []
    for part, size in zip(whole, shape, strict=True):
        if not isinstance(part, slice):
            number = index(part)
            if not -size <= number < size:
                raise IndexError(f"index {number} is out of range for a dimension of {size}")
            start.append(number % size)
            sizes.append(1)
            rest.append(0)
            continue
        if part.step is not None and part.step < 1:
            raise ConfigError(f"{key!r} has a step of {part.step}; give steps above 0")
        first, last, step = part.indices(size)
        start.append(first)
        sizes.append(max(0, last - first))
        rest.append(slice(None, None, step))
    return start, tuple(sizes), tuple(rest)
