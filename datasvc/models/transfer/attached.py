"""Finds the artefacts that the copies of versions at the target of a transfer lack."""

from __future__ import annotations

from collections.abc import Mapping

from datasvc.errors import ConflictError
from datasvc.models.versions.artefacts import Artefact, read_artefacts
from datasvc.repository import Repository, Resolved


def find_missing_artefacts(
    source: Repository, target: Repository, copies: Mapping[Resolved, Resolved | None]
) -> dict[Resolved, list[Artefact]]:
    """Return the artefacts of versions of the source that the target lacks; versions without any are left out.

    `copies` has the version at the target for each version of the source, None if there is none yet.

    Raises:
        ConflictError: the target has another artefact of the same name.
        CorruptDataError, UnavailableError: the log of the artefacts cannot be read in one of the repositories.
    """
    models = [version for version in copies if version.kind == "models"]
    at_source = {name: read_artefacts(source, name) for name in {version.name for version in models}}
    target_names = {copy.name for version in models if (copy := copies[version]) is not None}
    at_target = {name: read_artefacts(target, name) for name in target_names}
    missing: dict[Resolved, list[Artefact]] = {}
    for version in models:
        copy = copies[version]
        present = {} if copy is None else at_target[copy.name].get(copy.version, {})
        for artefact in at_source[version.name].get(version.version, {}).values():
            other = present.get(artefact.name)
            if other is None:
                missing.setdefault(version, []).append(artefact)
            elif other.files != artefact.files:
                raise ConflictError(
                    f"{copy} at the target has another artefact {artefact.name!r} than {version}: detach one of them"
                )
    return missing
