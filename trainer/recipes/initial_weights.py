"""Starts a run with the weights of a version. Each rank reads its part of a divided model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from datasvc.api import DataRepository
from datasvc.errors import ConfigError
from datasvc.models.restoring.fit import LoadReport, TensorSpec, plan_load
from datasvc.models.restoring.load_into_module import spec_of
from datasvc.models.restoring.restore import read_version
from datasvc.models.tensors.dtypes import cast
from datasvc.models.tensors.name_filter import select_names
from datasvc.trainer.recipes.checkpoints import restore
from datasvc.trainer.recipes.layouts.shard import to_local
from datasvc.trainer.recipes.model_check import check_sizes, describe_misfit, describe_whole_model
from datasvc.trainer.recipes.rejoin import call_on_first_rank
from datasvc.trainer.recipes.run import Run


def initialise(run: Run, repo: DataRepository, ref: str) -> None:
    """Load the weights of a version into the model of a new run. Every rank must call this.

    The version is a checkpoint of this program, or its tensors have the model's names. It becomes the parent of the
    run's first checkpoint.

    Raises:
        ConfigError: the tensors, without excluded ones, are not those of the model; the message has the differences.
        NotFoundError, CorruptDataError, UnavailableError: see `models.restore`.
    """
    stored, entry = call_on_first_rank(lambda: _read_tensors(repo, ref), name="init_from")
    own = {name: value for name, value in run.model.state_dict(keep_vars=True).items() if torch.is_tensor(value)}
    expected, tied = describe_whole_model(own, name="init_from.model")
    stored_names = _match_names(stored, expected)
    included = set(select_names([*dict.fromkeys([*expected, *stored_names])], exclude=run.config.init_exclude))
    if not included & stored_names.keys() & expected.keys():
        raise ConfigError(
            f"{ref} has no weights for the model {run.config.model!r}, whose tensors are "
            f"{', '.join(list(expected)[:3])}, ...; give --model the model of that version, or --init-from a version "
            "with these names"
        )
    report = plan_load(
        {name: spec for name, spec in expected.items() if name in included},
        {name: stored[stored_name] for name, stored_name in stored_names.items() if name in included},
        tied,
        cast=True,
    )
    # Without `layers`: tensors tell them apart, and some may be left out.
    check_sizes(run, ref, entry, but=("layers",), remedy="give another --init-from")
    _check_exact(run, report, ref)
    targets = {name: own[name].detach() for name in report.loaded if name in own and name in stored_names}
    parts = {
        # Tensors that are stored with another dtype are read first, and converted then.
        name: target if spec_of(target) == (spec := stored[stored_names[name]]) else _make_like(target, spec)
        for name, target in targets.items()
    }
    # The names are at the root of the tree: a rank that has none of these tensors then reads nothing.
    restore(run, ref, into={stored_names[name]: part for name, part in parts.items()})
    for name, target in targets.items():
        if parts[name] is not target:
            to_local(target).copy_(cast(name, to_local(parts[name]), target.dtype))
    # This changes only modules whose state dict has copies of their tensors.
    run.model.load_state_dict(targets, strict=False)
    if run.average is not None:
        run.average.restart()


def _read_tensors(repo: DataRepository, ref: str) -> tuple[dict[str, TensorSpec], Mapping[str, Any]]:
    """Return dtype and shape of the tensors of a version by name, and its entry."""
    stored = read_version(repo.repository, ref)
    return {record.name: TensorSpec(record.dtype, record.shape) for record in stored.records}, stored.entry


def _match_names(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, str]:
    """Return the stored name of each tensor of a version by the name that it has in a model."""
    # A checkpoint of this program has the prefix "model." before the names of weights, other versions have none. But
    # a model may itself have a module called "model", so choose the case in which more names fit.
    prefix = "model."
    names = {name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}
    if len(names.keys() & expected.keys()) < len(stored.keys() & expected.keys()):
        return {name: name for name in stored}
    return names


def _check_exact(run: Run, report: LoadReport, ref: str) -> None:
    if report.is_exact:
        return
    differing = [*(mismatch.name for mismatch in report.mismatched), *report.missing, *report.unexpected]
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in differing))
    raise ConfigError(
        f"{describe_misfit(run, ref, report)}\n"
        "train tensors that differ from random weights, and leave out those that the model lacks, with "
        f"--init-exclude {' '.join([*modules[:3], *(['...'] if len(modules) > 3 else [])])}"
    )


def _make_like(target: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor with another dtype and the placement of `target`."""
    return torch.empty_like(target, dtype=getattr(torch, spec.dtype))
