"""Shortens a lineage for a picture: a chain of versions of one model that read the same data becomes one version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from datasvc.models.provenance.lineage import Lineage, ModelOrigin


def collapse_chains(lineage: Lineage) -> tuple[Lineage, dict[str, list[str]]]:
    """Return a lineage with one version for each chain, and the versions of each chain, newest first.

    In a chain, each version continues the next one alone, and nothing else continues that one. Both are of the same
    run and read the same data, or one of them read nothing. A run that saves a thousand times is a chain. The version
    whose lineage it is stays alone.

    The version for a chain has the name of its newest version, the parents of its oldest one, and for each split the
    range from the first to the last position that the chain consumed.
    """
    num_children = Counter(parent for model in lineage.models.values() for parent in model.parents)
    chains: dict[str, list[ModelOrigin]] = {}
    chain_of: dict[str, str] = {}
    for name, model in lineage.models.items():
        if name in chain_of:
            continue
        chain = [model]
        while name != lineage.version and (older := _next(lineage, chain[-1], num_children)) is not None:
            if older.name in chain_of or older in chain:
                break
            chain.append(older)
        chains[name] = chain
        chain_of |= dict.fromkeys((member.name for member in chain), name)
    models = {name: _merged(chain, chain_of) for name, chain in chains.items()}
    return replace(lineage, models=models), {name: [each.name for each in chain] for name, chain in chains.items()}


def _next(lineage: Lineage, model: ModelOrigin, num_children: Mapping[str, int]) -> ModelOrigin | None:
    """Return the version that follows `model` in its chain; None if the chain ends."""
    if len(model.parents) != 1:
        return None
    older = lineage.models[model.parents[0]]
    is_same_model = older.name.partition("@")[0] == model.name.partition("@")[0]
    data, older_data = _tables(model), _tables(older)
    is_same_data = not data or not older_data or data == older_data
    is_alike = (older.evaluated, older.run) == (model.evaluated, model.run) and not older.gaps
    return older if is_same_model and is_same_data and is_alike and num_children[older.name] == 1 else None


def _tables(model: ModelOrigin) -> set[tuple[Any, Any]]:
    return {(segment["data"], segment["table"]) for segment in model.consumed}


def _merged(chain: Sequence[ModelOrigin], chain_of: Mapping[str, str]) -> ModelOrigin:
    consumed: dict[tuple[Any, Any], dict[str, Any]] = {}
    for model in chain:
        for segment in model.consumed:
            whole = consumed.setdefault((segment["data"], segment["table"]), dict(segment))
            whole["start"] = min(whole["start"], segment["start"])
            whole["stop"] = max(whole["stop"], segment["stop"])
    parents = tuple(dict.fromkeys(chain_of.get(parent, parent) for parent in chain[-1].parents))
    return replace(chain[0], parents=parents, consumed=tuple(consumed.values()))
