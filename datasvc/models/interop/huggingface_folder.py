"""Reads folders in Hugging Face's layout: weights as safetensors or `torch.save` files, and small other files.

The small files, such as `config.json` and `tokenizer.json`, are stored unchanged with the version. An export in this
layout writes them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from datasvc.durable import is_plain_name, target_outside
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.interop.safetensors_files import INDEX_FILE, SUFFIX, read_safetensors
from datasvc.models.interop.safetensors_header import parse_object
from datasvc.models.interop.state import ForeignState, ForeignTensor, check_file_name, check_inside
from datasvc.models.interop.torch_reader import read_torch_files
from datasvc.repository.logs.log import encode_entry

CONFIG_FILE: Final = "config.json"
TORCH_FILE: Final = "pytorch_model.bin"
TORCH_INDEX_FILE: Final = "pytorch_model.bin.index.json"
_TORCH_SUFFIX: Final = ".bin"
# Suffixes of files with weights or other tensors. Such a file is never stored with the version as a small file.
_WEIGHT_SUFFIXES: Final = frozenset(
    (SUFFIX, _TORCH_SUFFIX, ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".tflite")
)
# Limits for untrusted files, which are read into memory as a whole.
_MAX_INDEX_BYTES: Final = 32 << 20
_MAX_SMALL_FILE_BYTES: Final = 64 << 20  # the largest tokenizers have some 35 MB
_MAX_SMALL_FILES_BYTES: Final = 256 << 20
_MAX_SMALL_FILES: Final = 200
# A larger `config.json` is not copied into the entry: every listing of versions reads the entries.
_MAX_ENTRY_CONFIG_BYTES: Final = 1 << 20


def read_safetensors_index(folder: Path) -> ForeignState:
    """Return the model in the files that `model.safetensors.index.json` lists; for errors, see `_read_indexed`."""
    return _read_indexed(folder, INDEX_FILE, SUFFIX, lambda paths: [read_safetensors(path).tensors for path in paths])


def read_torch_folder(folder: Path, memory_bytes: int) -> ForeignState:
    """Return the model in `pytorch_model.bin`, or in the files that `pytorch_model.bin.index.json` lists.

    Raises:
        CorruptDataError, ConfigError, OSError: see `read_torch_file` and `_read_indexed`.
    """

    def read(paths: Sequence[Path]) -> list[Sequence[ForeignTensor]]:
        return [state.tensors for state in read_torch_files(paths, memory_bytes)]

    if (folder / TORCH_INDEX_FILE).exists():
        return _read_indexed(folder, TORCH_INDEX_FILE, _TORCH_SUFFIX, read)
    (state,) = read_torch_files([check_inside(folder, folder / TORCH_FILE)], memory_bytes)
    return replace(state, format="huggingface", weight_files=(TORCH_FILE,))


def _read_indexed(
    folder: Path, index_name: str, suffix: str, read: Callable[[Sequence[Path]], Sequence[Sequence[ForeignTensor]]]
) -> ForeignState:
    """Return the tensors of the files that an index lists.

    Args:
        folder: folder of the index and the files.
        index_name: name of the index.
        suffix: suffix of the files.
        read: function that returns the tensors of each file.

    Raises:
        CorruptDataError: the index is not valid, or lists a tensor that its file does not have.
        CorruptDataError, ConfigError, OSError: raised by `read`.
    """
    path = check_inside(folder, folder / index_name)
    if path.stat().st_size > _MAX_INDEX_BYTES:
        raise CorruptDataError(f"{path} has {path.stat().st_size} bytes; at most {_MAX_INDEX_BYTES} are supported")
    weight_map = parse_object(path.read_bytes(), str(path)).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptDataError(f"{path} has no weight_map; expected an object with a file per tensor")
    # The file that the index lists for each tensor.
    files = {
        name: check_file_name(folder, file, listed_in=index_name, suffix=suffix) for name, file in weight_map.items()
    }
    tensors: list[ForeignTensor] = []
    ignored: list[str] = []
    paths = sorted(set(files.values()))
    for weights_path, stored in zip(paths, read(paths), strict=True):
        # Leave out a tensor that the index lists for another file, or not at all; report its name as ignored.
        tensors += [tensor for tensor in stored if files.get(tensor.name) == weights_path]
        ignored += [tensor.name for tensor in stored if files.get(tensor.name) != weights_path]
    missing = files.keys() - {tensor.name for tensor in tensors}
    if missing:
        name = min(missing)
        raise CorruptDataError(
            f"{files[name]} does not have tensor {name!r}, although {index_name} lists it there; {len(missing)} "
            "tensors are missing in all"
        )
    weight_files = tuple(path.name for path in paths)
    return ForeignState("huggingface", tensors, ignored=tuple(ignored), weight_files=weight_files)


def with_small_files(state: ForeignState, folder: Path) -> ForeignState:
    """Return the state with the small files of its folder, and the parsed `config.json` if an entry can hold it.

    Other weights, subfolders, hidden files, links out of the folder and files above the limits are listed in
    `left_out`.

    Raises:
        ConfigError: `config.json` is not a file, or has more than 64 MiB.
        OSError: a file cannot be read.
    """
    files: dict[str, bytes] = {}
    left_out: list[str] = []
    remaining_bytes = _MAX_SMALL_FILES_BYTES
    # Read `config.json` first, so that it is not left out because of the other files.
    for path in sorted(folder.iterdir(), key=lambda path: (path.name != CONFIG_FILE, path.name)):
        if path.name in (*state.weight_files, INDEX_FILE, TORCH_INDEX_FILE):
            continue
        if path.suffix in _WEIGHT_SUFFIXES:
            left_out.append(path.name)
            continue
        if (target := target_outside(folder, path)) is not None:
            # A stored link would publish a file of the user who imports the folder of another person.
            left_out.append(f"{path.name} (a link out of the folder, to {target})")
            continue
        is_small = path.is_file() and path.stat().st_size <= min(_MAX_SMALL_FILE_BYTES, remaining_bytes)
        if path.name == CONFIG_FILE and not is_small:
            raise ConfigError(
                f"{path} is not a file of at most {_MAX_SMALL_FILE_BYTES} bytes, so it cannot be stored with a "
                "model: move it out of the folder"
            )
        if not is_small or not is_plain_name(path.name) or len(files) == _MAX_SMALL_FILES:
            left_out.append(path.name)
            continue
        files[path.name] = path.read_bytes()
        remaining_bytes -= len(files[path.name])
    config = _parse_config(files.get(CONFIG_FILE, b""), folder / CONFIG_FILE)
    return replace(state, config=config, files=files, left_out=tuple(left_out))


def _parse_config(raw: bytes, path: Path) -> Mapping[str, Any]:
    """Return the content of `config.json` for the entry of a version; {} if an entry cannot hold it."""
    if raw and len(raw) <= _MAX_ENTRY_CONFIG_BYTES:
        # An entry cannot hold some contents, such as infinities, which are not valid JSON. Leave such content out of
        # the entry: an export does not need it, because it uses the stored file.
        with suppress(CorruptDataError, ConfigError):
            parsed = parse_object(raw, str(path))
            encode_entry(parsed)  # raises if an entry cannot hold it
            return {"huggingface": parsed}
    return {}
