"""The registry: which models there are, and what their versions say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasvc.repository import Digest, Repository
from datasvc.repository.objects import parse_digest
from datasvc.repository.references import is_name


@dataclass(frozen=True)
class ModelVersion:
    """What a version's entry says.

    Attributes:
        name: of the model.
        version: its number.
        tags: that stand on it now.
        entry: step, data, code, config, metrics, parent, digests.
    """

    name: str
    version: int
    tags: tuple[str, ...]
    entry: Mapping[str, Any]

    @property
    def tensors(self) -> Digest:
        """Digest of the tensor table: equal for two versions exactly when all their tensors are equal."""
        return parse_digest(self.entry["tensors"])


def list_models(repository: Repository) -> list[ModelVersion]:
    """Return the newest version of every model, by name. Raises UnavailableError, CorruptDataError."""
    return [describe_model(repository, name) for name in repository.names("models")]


def describe_model(repository: Repository, ref: str) -> ModelVersion:
    """Return one version. Raises ConfigError, NotFoundError, CorruptDataError, UnavailableError."""
    version = repository.resolve("models", ref)
    entry = repository.entry(version).content
    tags = _tags_on(repository.tags("models", version.name), version.version)
    return ModelVersion(version.name, version.version, tags, entry)


def model_log(repository: Repository, name: str) -> list[ModelVersion]:
    """Return every version of a model, oldest first. Raises as `Repository.entries`."""
    tags = repository.tags("models", name) if is_name(name) else {}
    return [
        ModelVersion(name, entry.number, _tags_on(tags, entry.number), entry.content)
        for entry in repository.entries("models", name)
    ]


def _tags_on(tags: Mapping[str, int], version: int) -> tuple[str, ...]:
    return tuple(tag for tag, number in tags.items() if number == version)
