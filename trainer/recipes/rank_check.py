"""Checks at the start of a run that its ranks are replicas of one job: equal settings, code, layout and data.

Ranks that differ would wait for each other without end, or train a model that nobody has described.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.loaders.core.mixture import splits_of
from datasvc.models.versions.code_revision import describe_environment, identify_code
from datasvc.repository.logs.log import describe_numbers
from datasvc.trainer.job import runtime
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.training_data import TrainingData

# Settings of a node: paths, which may differ, and what changes no batch and no collective. That all ranks store to
# the same repository is checked by `CheckpointManager`, and that they read the same data by `check_data`.
_OF_NODE: Final = frozenset(
    {"repo", "cache", "cache_budget", "tenant", "local_checkpoints", "ledger", "metrics_port", "profile", "peers"}
    | {"prefetch", "decode_threads", "decode_lag", "decode_group", "decode_servers", "tune_loader"}
)
_PACKAGES: Final = ("datasvc", "torch")
_MAX_VALUES: Final = 3  # in a message
_MAX_TEXT: Final = 200


def check_job(config: TrainConfig, *, has_begun: bool = False) -> None:
    """Check that all ranks have the same settings, layout and code. Every rank calls this, before a run's operations.

    The code is the git commit of the working folder with its local changes, and the versions of datasvc and torch
    without builds; one rank of each node reads it. If the job `has_begun`, it is not compared: a rank that joins
    reads what has been edited since.

    Raises:
        ConfigError: ranks differ; see `check_facts`.
    """
    check_facts(facts_of_settings(config.to_dict()), name="start.settings")
    code: dict[str, Any] = {}
    if has_begun:
        return
    if hvd.size() > 1 and hvd.local_rank() == 0:
        packages = describe_environment()["packages"]
        code = {f"version of {name}": str(packages.get(name)).partition("+")[0] for name in _PACKAGES}
        if (revision := identify_code()) is not None:  # a node without git may have the same code
            code["code"] = revision
    check_facts(code, name="start.code")


def facts_of_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the settings of a rank, by name, that are equal on all ranks of a job."""
    facts = {name: value for name, value in settings.items() if name not in _OF_NODE}
    # The ranks exchange the addresses of servers that they start; other peers are of a node.
    return {**facts, "peers": settings["peers"] if settings["peers"] == "ranks" else None}


def check_data(data: TrainingData, versions: Sequence[str]) -> None:
    """Check that the data sets have the same content on all ranks. Every rank calls this.

    A rank may read another repository than rank 0, which resolved the names of the versions.

    Raises:
        ConfigError: ranks differ; see `check_facts`.
    """
    splits = {"train": data.train, "val": data.val}
    facts = {
        f"the data of {' + '.join(versions)}, split {name!r}": [each.digest for each in splits_of(split)]
        for name, split in splits.items()
        if split is not None
    }
    check_facts(facts, name="start.data")


def check_facts(facts: Mapping[str, Any], *, name: str) -> None:
    """Check that facts are equal on all ranks that have them. Every rank calls this.

    The ranks first compare digests, so equal facts cost one small all-gather.

    Args:
        facts: JSON values by the names that a message has.
        name: name of the operations.

    Raises:
        ConfigError: ranks differ. In an elastic job it is raised only on ranks that differ from rank 0, which has
            the state of the run; the other ranks lose these, and continue without them.
    """
    if hvd.size() == 1:
        return
    text = json.dumps(facts, sort_keys=True)
    digests = hvd.allgather_object(hashlib.sha256(text.encode()).digest(), name=f"{name}.digests")
    # If only one rank of each node has facts, digests differ in equal jobs too.
    if len(set(digests)) == 1:
        return
    all_facts = hvd.allgather_object(facts, name=name)
    message = describe_difference(all_facts)
    if message is not None and not (runtime.is_elastic() and describe_difference([all_facts[0], facts]) is None):
        raise ConfigError(message)


def describe_difference(all_facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a message about the first fact that differs between ranks, in the order of names; None: all are equal.

    Args:
        all_facts: facts of each rank. A rank that lacks a fact differs from no other one in it.
    """
    differing = []
    for name in dict.fromkeys(name for facts in all_facts for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(all_facts):
            if name in facts:
                ranks.setdefault(json.dumps(facts[name], sort_keys=True), []).append(rank)
        if len(ranks) > 1:
            differing.append((name, ranks))
    if not differing:
        return None
    (name, ranks), *others = differing
    shown = [_describe_ranks(numbers, value) for value, numbers in list(ranks.items())[:_MAX_VALUES]]
    if len(ranks) > _MAX_VALUES:
        shown.append(f"others have {len(ranks) - _MAX_VALUES} more values")
    also = f"; they also differ in {', '.join(name for name, _ in others)}" if others else ""
    return (
        f"the ranks of this job differ in {name}: {', '.join(shown)}{also}. Start all ranks with the same options, "
        "configuration file, variables, code and data"
    )


def _describe_ranks(ranks: Sequence[int], value: str) -> str:
    value = value if len(value) <= _MAX_TEXT else f"{value[:_MAX_TEXT]}..."
    return f"rank {ranks[0]} has {value}" if len(ranks) == 1 else f"ranks {describe_numbers(ranks)} have {value}"
