"""safetensors files: one, or a folder in Hugging Face's layout, where an index names the file of every tensor.

Read block by block and written tensor by tensor: neither holds a file in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from datasvc import durable
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.interop.safetensors_header import Placed, encode_header, parse_object, read_header
from datasvc.models.interop.state import ForeignState, ForeignTensor, flat_skeleton
from datasvc.models.restoring.fit import TensorSpec
from datasvc.models.tensors.chunks import Shape, plan_chunks
from datasvc.models.tensors.tensor_table import ITEM_BYTES
from datasvc.repository.logs.log import encode_entry

if TYPE_CHECKING:
    import torch

SUFFIX: Final = ".safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
CONFIG_FILE: Final = "config.json"
TENSORS_FILE, STATE_FILE, ENTRY_FILE = "tensors.safetensors", "state.json", "entry.json"
_MAX_JSON_BYTES: Final = 32 << 20
_MAX_CONFIG_BYTES: Final = 16 << 20
# An entry is read by whoever lists versions.
_MAX_ENTRY_CONFIG_BYTES: Final = 1 << 20
GROUP_BYTES: Final = 256 << 20
_METADATA: Final = {"format": "pt"}


def read_safetensors(path: Path) -> ForeignState:
    """Return the tensors of a file.

    Raises:
        CorruptDataError, ConfigError: see `read_header`.
        OSError: it cannot be read.
    """
    return ForeignState("safetensors", _tensors(path, _read_placed(path)))


def read_safetensors_folder(folder: Path) -> ForeignState:
    """Return the model in a folder: Hugging Face's layout, or what `models export` wrote.

    Raises:
        CorruptDataError, ConfigError: see `read_header`; or index and files do not agree, or which file is meant is
            not clear.
        OSError: something cannot be read.
    """
    if (folder / INDEX_FILE).exists():
        return _read_indexed(folder)
    files = sorted(file for file in folder.iterdir() if file.suffix == SUFFIX and file.is_file())
    if len(files) != 1:
        raise ConfigError(
            f"{folder} has {len(files)} safetensors files and no {INDEX_FILE}; name the one file that is meant"
        )
    tensors = _tensors(files[0], _read_placed(files[0]))
    state = folder / STATE_FILE
    if files[0].name == TENSORS_FILE:
        names = {each.name: each.name for each in tensors}
        return ForeignState("safetensors", tensors, _read_json(state) if state.exists() else flat_skeleton(names))
    return _with_config(ForeignState("huggingface", tensors), folder)


def write_safetensors(
    path: Path,
    specs: Mapping[str, TensorSpec],
    load: Callable[[Sequence[str]], Mapping[str, torch.Tensor]],
    *,
    group_bytes: int = GROUP_BYTES,
) -> None:
    """Write tensors to a file that is there, whole, once this returns.

    Args:
        path: of the file.
        specs: the tensors.
        load: returns some of them; called with names of tensors that have at most `group_bytes` together, or one.
        group_bytes: how much to hold in memory.

    Raises:
        ConfigError: safetensors has no dtype for a tensor.
        OSError: it cannot be written.
    """
    # Wide elements first, so that every tensor is aligned to its element's size.
    names = sorted(specs, key=lambda name: (-ITEM_BYTES[specs[name].dtype], name))
    header = encode_header(((name, specs[name].dtype, specs[name].shape) for name in names), _METADATA)
    with durable.replacing(path) as file:
        file.write(header)
        for group in group_names(names, specs, group_bytes):
            loaded = load(group)
            for name in group:
                _write_tensor(file, loaded[name])


def write_checkpoint(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    load: Callable[[Sequence[str]], Mapping[str, torch.Tensor]],
    skeleton: Any | None,
    entry: Mapping[str, Any],
) -> None:
    """Write tensors, the state around them and the entry of a version, as `read_safetensors_folder` reads them.

    `specs` and `load` are those of `write_safetensors`; without a skeleton there is no state. Raises likewise.
    """
    write_safetensors(folder / TENSORS_FILE, specs, load)
    if skeleton is not None:
        write_json(folder / STATE_FILE, skeleton)
    write_json(folder / ENTRY_FILE, dict(entry))


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people and programs. Raises OSError."""
    durable.write_file(path, (json.dumps(value, indent=2) + "\n").encode())


def write_index(folder: Path, files: Mapping[str, Iterable[str]], total_bytes: int) -> Path:
    """Write the index of a folder in Hugging Face's layout: `files` gives the tensors of each. Raises OSError."""
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    durable.write_file(folder / INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())
    return folder / INDEX_FILE


def group_names(names: Iterable[str], specs: Mapping[str, TensorSpec], most_bytes: int) -> Iterator[list[str]]:
    """Yield runs of names whose tensors have at most `most_bytes` together; a larger one comes alone."""
    group: list[str] = []
    group_bytes = 0
    for name in names:
        if group and group_bytes + specs[name].nbytes > most_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(name)
        group_bytes += specs[name].nbytes
    if group:
        yield group


def _read_indexed(folder: Path) -> ForeignState:
    index = _read_json(folder / INDEX_FILE)
    wanted = index.get("weight_map")
    if not isinstance(wanted, dict):
        raise CorruptDataError(f"{folder / INDEX_FILE} has no weight_map")
    files = {name: _plain_file(folder, file) for name, file in wanted.items()}
    tensors: list[ForeignTensor] = []
    ignored: list[str] = []
    for path in sorted(set(files.values())):
        there = _tensors(path, _read_placed(path))
        tensors += [each for each in there if files.get(each.name) == path]
        ignored += [each.name for each in there if files.get(each.name) != path]
    lacking = files.keys() - {each.name for each in tensors}
    if lacking:
        name = min(lacking)
        raise CorruptDataError(
            f"{files[name]} lacks tensor {name!r}, which {INDEX_FILE} says it has; {len(lacking)} are missing in all"
        )
    return _with_config(ForeignState("huggingface", tensors, ignored=tuple(ignored)), folder)


def _plain_file(folder: Path, name: object) -> Path:
    """Return a file of the folder that its index names. Raises CorruptDataError where it names another place."""
    if not isinstance(name, str) or not name.endswith(SUFFIX) or not durable.is_plain_name(name):
        raise CorruptDataError(
            f"{folder / INDEX_FILE} names {str(name)[:80]!r}; expected the name of a {SUFFIX} file beside it"
        )
    return folder / name


def _read_placed(path: Path) -> list[Placed]:
    with path.open("rb") as file:
        return read_header(file, path.stat().st_size, str(path))


def _read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise CorruptDataError(f"{path} has {path.stat().st_size} bytes; at most {_MAX_JSON_BYTES} are believed")
    return parse_object(path.read_bytes(), str(path))


def _with_config(state: ForeignState, folder: Path) -> ForeignState:
    """Return a state with the `config.json` beside it: its bytes as they are, and what it says where an entry can."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return state
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ConfigError(
            f"{path} has {path.stat().st_size} bytes; at most {_MAX_CONFIG_BYTES} are kept with a model: move it away"
        )
    raw = path.read_bytes()
    config: Mapping[str, Any] = {}
    if len(raw) <= _MAX_ENTRY_CONFIG_BYTES:
        # Infinities, which Python writes and JSON lacks, among much else: the bytes are what counts.
        with suppress(CorruptDataError, ConfigError):
            said = parse_object(raw, str(path))
            encode_entry(said)
            config = {"huggingface": said}
    return replace(state, config=config, files={CONFIG_FILE: raw})


def _tensors(path: Path, placed: Iterable[Placed]) -> list[ForeignTensor]:
    return [ForeignTensor(each.name, each.dtype, each.shape, _reader(path, each)) for each in placed]


def _reader(path: Path, placed: Placed) -> Callable[[], Iterator[tuple[Shape, torch.Tensor]]]:
    def blocks() -> Iterator[tuple[Shape, torch.Tensor]]:
        import torch

        dtype = getattr(torch, placed.dtype)
        # Read, not mapped: a file that gets shorter meanwhile is an error then, and not the end of the process.
        with path.open("rb", buffering=0) as file:
            file.seek(placed.offset)
            for start, shape in plan_chunks(placed.shape, ITEM_BYTES[placed.dtype]):
                yield start, _read_block(file, dtype, shape, placed, path)

    return blocks


def _read_block(file: Any, dtype: torch.dtype, shape: Shape, placed: Placed, path: Path) -> torch.Tensor:
    import torch

    block = torch.empty(shape, dtype=dtype)
    view = _bytes_of(block)
    filled = 0
    while filled < view.nbytes:
        length = file.readinto(view[filled:])
        if not length:
            raise CorruptDataError(f"{path} was cut off in tensor {placed.name!r}; it changed while it was read")
        filled += length
    return block


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    if tensor.numel():
        file.write(_bytes_of(tensor.contiguous()))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, a view."""
    import torch

    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view
