"""Attaches files to model versions as artefacts, and writes them to disk again, verified.

The opset of an ONNX file is read without the package onnx, and without its weights.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from datasvc import durable
from datasvc.errors import ConfigError, NotFoundError, UnavailableError
from datasvc.models.interop.state import check_inside, check_regular
from datasvc.models.interop.whole_folder import check_target, create_folder
from datasvc.models.versions.artefacts import (
    Artefact,
    artefacts,
    check_artefact_name,
    check_path,
    find_artefact,
    record_artefact,
)
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import ObjectInfo, Repository, Resolved

_READ_BYTES: Final = 8 << 20
_FORMATS: Final = {
    ".onnx": "onnx", ".engine": "tensorrt", ".plan": "tensorrt", ".pt2": "torch.export", ".pte": "executorch",
    ".tflite": "tflite", ".gguf": "gguf", ".safetensors": "safetensors", ".mlpackage": "coreml", ".xml": "openvino",
}  # fmt: skip
# Numbers of the fields of `ModelProto` and `OperatorSetIdProto` in onnx.proto.
_IR_VERSION, _PRODUCER, _PRODUCER_VERSION, _OPSET = 1, 2, 3, 8
_DOMAIN, _VERSION = 1, 2
_MAX_FIELD_BYTES: Final = 4096
_MAX_FIELDS: Final = 10_000
_DEFAULT_DOMAINS: Final = ("", "ai.onnx")


def attach(
    repository: Repository,
    ref: str | Resolved,
    path: str | Path,
    *,
    name: str | None = None,
    format: str | None = None,  # noqa: A002 - the usual name of this argument
    details: Mapping[str, Any] | None = None,
    message: str = "",
    progress: Progress = NO_PROGRESS,
) -> Artefact:
    """Store a file, or all files of a folder, as an artefact of a version. Attaching equal files again has no effect.

    A signature of the version does not cover its artefacts.

    Args:
        repository: repository of the version.
        ref: NAME, NAME@VERSION or NAME@TAG.
        path: local file or folder.
        name: name of the artefact; default: that of the file or folder.
        format: format of the files; default: from the name of a file, such as "onnx", or "files".
        details: facts about the files, as JSON values; for ONNX files, the opset, the version of the format and the
            producer are added.
        message: text to keep with the artefact.
        progress: counts the bytes of each part that was stored.

    Raises:
        ConfigError: the folder is empty, has a link out or something that is no file, or a name is not valid.
        NotFoundError: the version or `path` does not exist.
        ConflictError: the version has another artefact of this name; see `detach`.
        UnavailableError: a file cannot be read, or the store does not respond.
        UnknownOutcomeError: see `Log.append`.
    """
    version = repository.resolve("models", ref)
    source = Path(path)
    try:
        sources = _list_files(source, check_artefact_name(name or Path(os.path.realpath(source)).name))
        found_format, found_details = _describe(sources)
        progress.begin(sum(file.stat().st_size for file in sources.values()))
        files = {file_name: _store(repository, file, progress) for file_name, file in sources.items()}
    except FileNotFoundError as error:
        raise NotFoundError(f"{error.filename or source} does not exist") from error
    except OSError as error:
        raise UnavailableError(f"cannot read {source}: {error}") from error
    artefact = Artefact(
        version,
        name or Path(os.path.realpath(source)).name,
        format or found_format,
        files,
        {**found_details, **(details or {})},
        message,
    )
    return record_artefact(repository, artefact)


def fetch_artefacts(
    repository: Repository,
    ref: str | Resolved,
    folder: str | Path,
    names: Collection[str] = (),
    *,
    progress: Progress = NO_PROGRESS,
) -> list[Path]:
    """Write artefacts of a version into a new folder; every byte is verified. Return the paths of their files.

    An artefact of a single file becomes `folder/NAME`, that of a folder becomes the folder `folder/NAME`.

    Args:
        repository: repository of the version.
        ref: NAME, NAME@VERSION or NAME@TAG.
        folder: local folder; must be empty or not exist.
        names: names of the artefacts; () for all.
        progress: counts the bytes of each part that was written.

    Raises:
        ConfigError: `ref` is not valid, or the folder is not empty or not writable.
        NotFoundError: the version has no such artefact, or none at all; or a file is missing in the repository.
        CorruptDataError: a file does not match its digest. Nothing was written.
        UnavailableError: the store does not respond, or the disk is full. Nothing was written.
    """
    target = check_target(Path(folder))
    version = repository.resolve("models", ref)
    attached = artefacts(repository, version)
    if not attached:
        raise NotFoundError(f"{version} has no artefacts; datasvc models attach {version} FILE adds one")
    chosen = [find_artefact(attached, name, version) for name in dict.fromkeys(names)] or attached
    files = {path: info for artefact in chosen for path, info in _paths_below(artefact).items()}
    progress.begin(sum(info.size_bytes for info in files.values()))
    with create_folder(target) as temporary:
        for path, info in files.items():
            durable.make_folder((temporary / path).parent)
            with durable.replacing(temporary / path) as file:
                repository.objects.fetch(info.digest, info.size_bytes, file, progress=progress)
    return [Path(folder) / path for path in files]


def _paths_below(artefact: Artefact) -> dict[str, ObjectInfo]:
    """Return the files of an artefact by their paths below the folder that they are fetched into."""
    if list(artefact.files) == [artefact.name]:
        return dict(artefact.files)
    return {f"{artefact.name}/{path}": info for path, info in artefact.files.items()}


def _list_files(source: Path, name: str) -> dict[str, Path]:
    """Return the files to attach, by their paths in the artefact `name`."""
    if not source.is_dir():
        return {name: check_regular(source)}
    paths = [path for path in sorted(source.rglob("*")) if not path.is_dir() or path.is_symlink()]
    files = {str(path.relative_to(source)): check_inside(source, path) for path in paths}
    if not files:
        raise ConfigError(f"{source} has no files to attach")
    try:
        return {check_path(path): file for path, file in files.items()}
    except ValueError as error:
        raise ConfigError(f"{source} cannot be attached: {error}") from error


def _describe(files: Mapping[str, Path]) -> tuple[str, dict[str, Any]]:
    """Return the format of the files, and facts that they have in themselves."""
    for path in files.values():
        found = _FORMATS.get(path.suffix.lower())
        if found == "onnx":
            return found, read_onnx_details(path)
        if found:
            return found, {}
    return "files", {}


def _store(repository: Repository, path: Path, progress: Progress) -> ObjectInfo:
    with path.open("rb") as file, repository.objects.writing() as writer:
        while content := file.read(_READ_BYTES):
            writer.write(content)
            progress.advance(len(content))
    return writer.info


def read_onnx_details(path: Path) -> dict[str, Any]:
    """Return `opset` (of the default domain), `ir_version` and `producer` of a file, as far as it has them.

    A file that is not ONNX gives {}. Raises OSError: the file cannot be read.
    """
    details: dict[str, Any] = {}
    with path.open("rb") as file:
        try:
            fields = list(_fields(file, path.stat().st_size, (_PRODUCER, _PRODUCER_VERSION, _OPSET)))
            producer = [value.decode() for number, value in fields if number in (_PRODUCER, _PRODUCER_VERSION)]
            for number, value in fields:
                if number == _OPSET:
                    opset = dict(_parse(value))
                    if opset.get(_DOMAIN, b"").decode() in _DEFAULT_DOMAINS and _VERSION in opset:
                        details["opset"] = opset[_VERSION]
                elif number == _IR_VERSION:
                    details["ir_version"] = value
        except (ValueError, TypeError, AttributeError):
            return {}
    # A file of another format may look like some of these fields.
    if "opset" not in details or "ir_version" not in details:
        return {}
    return details | ({"producer": " ".join(filter(None, producer))} if any(producer) else {})


def _parse(message: bytes) -> Iterator[tuple[int, Any]]:
    import io

    yield from _fields(io.BytesIO(message), len(message), (_DOMAIN,))


def _fields(file: IO[bytes], stop: int, texts: Collection[int]) -> Iterator[tuple[int, Any]]:
    """Yield number and value of the integers, and of the short texts and messages in `texts`, of a protobuf message.

    Raises ValueError: the bytes are not a protobuf message.
    """
    for _ in range(_MAX_FIELDS):
        if file.tell() >= stop:
            return
        key = _varint(file)
        number, kind = key >> 3, key & 7
        if kind == 0:
            yield number, _varint(file)
        elif kind == 2:
            length = _varint(file)
            if file.tell() + length > stop:
                raise ValueError("a field extends beyond the file")
            if number in texts and length <= _MAX_FIELD_BYTES:
                yield number, file.read(length)
            else:
                file.seek(length, 1)  # the graph, which has the weights
        elif kind in (1, 5):
            file.seek(8 if kind == 1 else 4, 1)
        else:
            raise ValueError(f"{kind} is not a kind of field")
    raise ValueError("too many fields")


def _varint(file: IO[bytes]) -> int:
    value = 0
    for shift in range(0, 64, 7):
        byte = file.read(1)
        if not byte:
            raise ValueError("the file ends inside a number")
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise ValueError("a number has more than 64 bits")
