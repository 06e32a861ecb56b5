"""Tensors of a checkpoint into a model: all that fit, or none, with a report of what differs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasvc.errors import ConfigError
from datasvc.models.restoring.checkpoint import Checkpoint
from datasvc.models.restoring.fit import LoadReport, TensorSpec, plan_load
from datasvc.models.restoring.stored_version import read_version
from datasvc.models.tensors.casting import cast as cast_tensor
from datasvc.models.tensors.chunk_reader import ChunkSource
from datasvc.models.tensors.dtypes import dtype_name
from datasvc.models.tensors.name_filter import is_below, map_names
from datasvc.models.tensors.read import load_tensors
from datasvc.models.tensors.state_tree import flatten
from datasvc.repository import Repository, Resolved

if TYPE_CHECKING:
    import torch


def load_into(
    model: torch.nn.Module,
    checkpoint: Checkpoint | Mapping[str, Any],
    *,
    prefix: str = "model",
    strict: bool = True,
    cast: bool = False,
    rename: Mapping[str, str] | None = None,
) -> LoadReport:
    """Fill a model's parameters and buffers from a checkpoint.

    Args:
        model: a module on any device; its non-tensor extra state is left alone.
        checkpoint: from `restore`, or a state tree of tensors.
        prefix: where in the state the model's tensors are; "" for a bare state dict.
        strict: raise where anything differs, before anything is loaded. Otherwise load what fits.
        cast: let dtypes differ, values are converted.
        rename: maps the checkpoint's names, prefix taken off, to the model's; see `name_filter.map_names`.

    Returns:
        What was loaded and what was not.

    Raises:
        ConfigError: strict, and something differs: with a table of it. Or nothing lies below `prefix`.
    """
    state = checkpoint if isinstance(checkpoint, Mapping) else checkpoint.state
    _, tensors = flatten(state)
    names = names_below(tensors, prefix, rename)
    old_names = {new: old for old, new in names.items()}
    title = "the state" if isinstance(checkpoint, Mapping) else str(checkpoint.version)
    found = {new: spec_of(tensors[old]) for old, new in names.items()}

    def are_equal(one: str, other: str) -> bool:
        return _are_equal(tensors[old_names[one]], tensors[old_names[other]])

    report = checked_plan(model, found, title, strict=strict, cast=cast, are_equal=are_equal)
    fill(model, {name: tensors[old_names[name]] for name in report.loaded if name in old_names})
    return report


def load_version_into(
    model: torch.nn.Module,
    repository: Repository,
    ref: str | Resolved,
    *,
    prefix: str = "model",
    strict: bool = True,
    cast: bool = False,
    rename: Mapping[str, str] | None = None,
    source: ChunkSource | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
    report: Callable[[int], None] | None = None,
) -> LoadReport:
    """Fill a model's parameters and buffers from a version. Only what it takes is read; nothing if it does not fit.

    Arguments, result and errors are those of `load_into` and `checkpoint.restore`.
    """
    stored = read_version(repository, ref, trusted_keys=trusted_keys)
    records = {record.name: record for record in stored.records}
    found = {new: replace(records[old], name=new) for old, new in names_below(records, prefix, rename).items()}
    specs = {name: TensorSpec(record.dtype, record.shape) for name, record in found.items()}
    objects = source or repository.objects

    def are_equal(one: str, other: str) -> bool:
        if found[one].content == found[other].content:
            return True
        # Equal tensors may be cut differently, where they were imported.
        return _are_equal(*load_tensors(objects, [found[one], found[other]]).values())

    plan = checked_plan(model, specs, str(stored.version), strict=strict, cast=cast, are_equal=are_equal)
    wanted = [found[name] for name in plan.loaded if name in found]
    fill(model, load_tensors(objects, wanted, report=report))
    return plan


def names_below(names: Iterable[str], prefix: str, rename: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the names below `prefix`, each with what it becomes without it and mapped. Raises ConfigError."""
    every = list(names)
    whole = prefix.rstrip(".")
    cut = len(f"{whole}.") if whole else 0
    inner = {name: name[cut:] for name in every if is_below(name, prefix) and len(name) > cut}
    if not inner and every:
        tops = ", ".join(sorted({name.partition(".")[0] for name in every})[:10])
        raise ConfigError(
            f"no tensor lies below {prefix!r}; the state has: {tops}. Say prefix=, or prefix='' for all"
        )
    mapped = map_names(inner.values(), rename)
    return {old: mapped[name] for old, name in inner.items()}


def checked_plan(
    model: torch.nn.Module,
    found: Mapping[str, TensorSpec],
    title: str,
    *,
    strict: bool,
    cast: bool,
    are_equal: Callable[[str, str], bool],
) -> LoadReport:
    """Compare a model with what there is for it. Raises ConfigError where they differ and `strict`.

    Arguments are those of `load_into` and `plan_load`; `title` names the checkpoint.
    """
    wanted, tied = _describe(model)
    report = plan_load(wanted, found, tied, cast=cast, are_equal=are_equal)
    if strict and not report.is_exact:
        raise ConfigError(
            f"{title} does not fit {type(model).__name__}, nothing was loaded: {report}\n"
            "map names with rename=, convert dtypes with cast=True, or load what fits with strict=False"
        )
    return report


def fill(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors that fit into a model; it is as it was where one of its own hooks refuses.

    Meanwhile memory holds the tensors' old values, too. Raises ConfigError where the model refuses.
    """
    import torch

    current = model.state_dict(keep_vars=True)
    # Modules look up in it which version of their own format a state has: what fits them is of today's.
    state = OrderedDict(tensors)
    state._metadata = getattr(current, "_metadata", None)  # type: ignore[attr-defined] # noqa: SLF001 - torch's place
    for name, tensor in tensors.items():
        if name in current:
            cast_tensor(name, tensor, current[name].dtype)  # refuses what would become infinite
    old = {name: current[name].detach().to("cpu", copy=True) for name in tensors if name in current}
    try:
        model.load_state_dict(state, strict=False)
    except BaseException as error:
        with torch.no_grad():
            for name, value in old.items():
                current[name].copy_(value)
        if isinstance(error, (RuntimeError, ValueError, TypeError, KeyError)):
            raise ConfigError(f"{type(model).__name__} refuses its tensors: {error}") from error
        raise


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bytes, NaN and all."""
    import torch

    if spec_of(one) != spec_of(other):
        return False
    a, b = (each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(a, b)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Return dtype and shape of a tensor."""
    return TensorSpec(dtype_name(tensor), tuple(tensor.shape))


def _describe(model: torch.nn.Module) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Return the model's tensors, and of those that are another one under a second name, which."""
    import torch
    from torch.nn.parameter import is_lazy

    wanted: dict[str, TensorSpec] = {}
    tied: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue  # extra state
        if is_lazy(value):
            raise ConfigError(
                f"{type(model).__name__}: {name} has no shape yet; run one batch through the model first"
            )
        if value.is_meta:
            raise ConfigError(
                f"{type(model).__name__}: {name} has no memory yet; call model.to_empty(device=...) first"
            )
        wanted[name] = spec_of(value)
        if not value.numel():
            continue
        place = (value.device, value.data_ptr(), tuple(value.shape), value.stride())
        if owners.setdefault(place, name) != name:
            tied[name] = owners[place]
    return wanted, tied
