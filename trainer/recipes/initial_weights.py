"""Starts a run with the weights of a version. Each rank reads its part of a divided model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import datasvc.trainer as hvd
from datasvc.api import DataRepository
from datasvc.errors import ConfigError
from datasvc.models.restoring.fit import LoadReport, TensorSpec, plan_load
from datasvc.models.restoring.load_into_module import spec_of
from datasvc.models.restoring.stored_version import read_version
from datasvc.models.tensors.dtypes import cast
from datasvc.models.tensors.name_filter import select_names
from datasvc.trainer.recipes.checkpoints import restore
from datasvc.trainer.recipes.first_rank import call_on_first_rank
from datasvc.trainer.recipes.layouts.parts import to_local
from datasvc.trainer.recipes.run import Run


def initialise(run: Run, repo: DataRepository, ref: str) -> None:
    """Load the weights of a version into the model of a new run. Every rank must call this.

    The version is a checkpoint of this program, or its tensors have the model's names. It becomes the parent of the
    run's first checkpoint.

    Raises:
        ConfigError: the tensors, without excluded ones, are not those of the model; the message has the differences.
        NotFoundError, CorruptDataError, UnavailableError: see `models.restore`.
    """
    stored = call_on_first_rank(
        lambda: {
            record.name: TensorSpec(record.dtype, record.shape)
            for record in read_version(repo.repository, ref).records
        },
        name="init_from",
    )
    own = {name: value for name, value in run.model.state_dict(keep_vars=True).items() if torch.is_tensor(value)}
    expected, tied = _describe_whole_model(own)
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
    _check_exact(report, ref, run.config.model)
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


def _describe_whole_model(own: Mapping[str, torch.Tensor]) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Return dtype and shape of the tensors of all ranks by name, and the tied names as `plan_load` takes them.

    Every rank must call this, with the tensors that it has.
    """
    specs, tied = {}, {}
    first_names: dict[int, str] = {}
    for name, value in own.items():
        specs[name] = spec_of(value)
        if first_names.setdefault(id(value), name) != name:
            tied[name] = first_names[id(value)]
    all_specs: dict[str, TensorSpec] = {}
    all_tied: dict[str, str] = {}
    for rank_specs, rank_tied in hvd.allgather_object((specs, tied), name="init_from.model"):
        all_specs |= rank_specs
        all_tied |= rank_tied
    return all_specs, all_tied


def _match_names(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, str]:
    """Return the stored name of each tensor of a version by the name that it has in a model."""
    # A checkpoint of this program has the prefix "model." before the names of weights, other versions have none. But
    # a model may itself have a module called "model", so choose the case in which more names fit.
    prefix = "model."
    names = {name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}
    if len(names.keys() & expected.keys()) < len(stored.keys() & expected.keys()):
        return {name: name for name in stored}
    return names


def _check_exact(report: LoadReport, ref: str, model_name: str | None) -> None:
    if report.is_exact:
        return
    differing = [*(mismatch.name for mismatch in report.mismatched), *report.missing, *report.unexpected]
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in differing))
    raise ConfigError(
        f"{ref} does not fit the model {model_name!r} of this run: {report}\n"
        "train tensors that differ from random weights, and leave out those that the model lacks, with "
        f"--init-exclude {' '.join([*modules[:3], *(['...'] if len(modules) > 3 else [])])}"
    )


def _make_like(target: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor with another dtype and the placement of `target`."""
    return torch.empty_like(target, dtype=getattr(torch, spec.dtype))
