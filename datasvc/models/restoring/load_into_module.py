"""Loads tensors of a checkpoint into a torch module, and reports the differences between them.

All names, dtypes and shapes are compared before a tensor is changed. After an error the module has its old values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from datasvc.cache import Cache
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError
from datasvc.models.restoring.copies import StoredCopies
from datasvc.models.restoring.fit import LoadReport, TensorSpec, plan_load
from datasvc.models.restoring.restore import Checkpoint, read_version
from datasvc.models.tensors.dtypes import cast as cast_tensor
from datasvc.models.tensors.dtypes import dtype_name
from datasvc.models.tensors.name_filter import is_below, map_names
from datasvc.models.tensors.state_tree import flatten
from datasvc.models.tensors.tensor_classes import has_memory, is_sharded, memory_of
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Repository, Resolved

if TYPE_CHECKING:
    import torch

_WRAPPERS: Final = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes in which `torch.compile`, data parallelism and checkpointing keep the module that they wrap."""


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
        model: a module on any device. Its extra state that is not a tensor is not changed.
        checkpoint: result of `restore`, or a state tree of tensors.
        prefix: prefix of the model's tensors in the state; "" for a bare state dict.
        strict: whether to raise ConfigError on any difference, before anything is loaded. If False, load what fits.
        cast: whether dtypes may differ; values are then converted to the model's dtypes.
        rename: map from the checkpoint's names without prefix to the model's; see `name_filter.map_names`.

    Returns:
        Which tensors were loaded and which were not.

    Raises:
        ConfigError: `strict` is set and there are differences (the message has them); no tensor is below `prefix`.
    """
    state = checkpoint if isinstance(checkpoint, Mapping) else checkpoint.state
    _, tensors = flatten(state)
    names = names_below(tensors, prefix, rename, model=model)
    stored_names = {name: stored for stored, name in names.items()}  # name in the checkpoint by name in the model
    title = "the state" if isinstance(checkpoint, Mapping) else str(checkpoint.version)
    specs = {name: spec_of(tensors[stored]) for stored, name in names.items()}

    def are_equal(one: str, other: str) -> bool:
        return _are_equal(tensors[stored_names[one]], tensors[stored_names[other]])

    report = checked_plan(model, specs, title, prefix=prefix, strict=strict, cast=cast, are_equal=are_equal)
    # If the checkpoint lacks a name in `loaded`, the name is tied to (has the memory of) one that `fill` sets.
    fill(model, {name: tensors[stored_names[name]] for name in report.loaded if name in stored_names})
    return report


def load_version_into(
    repository: Repository,
    model: torch.nn.Module,
    ref: str | Resolved,
    *,
    prefix: str = "model",
    strict: bool = True,
    cast: bool = False,
    rename: Mapping[str, str] | None = None,
    cache: Cache | str | Path | None = None,
    peers: Peers | None = None,
    fallback: Sequence[Repository | str] | Repository | str = (),
    trusted_keys: Sequence[str | Path] | None = None,
    progress: Progress = NO_PROGRESS,
) -> LoadReport:
    """Fill a model's parameters and buffers from a version. Only the tensors that will be loaded are read.

    The tensor table is compared with the model first. This reads values only for tied names. For arguments, result
    and errors see `load_into` and `restore`.
    """
    copies = StoredCopies(repository, cache=cache, peers=peers, fallback=fallback)
    stored = read_version(repository, ref, read=copies.direct.read, trusted_keys=trusted_keys)
    records = {record.name: record for record in stored.records}
    names = names_below(records, prefix, rename, model=model)
    renamed = {name: replace(records[stored_name], name=name) for stored_name, name in names.items()}
    specs = {name: TensorSpec(record.dtype, record.shape) for name, record in renamed.items()}

    def are_equal(one: str, other: str) -> bool:
        if renamed[one].content == renamed[other].content:
            return True
        # Imported tensors may have other chunk boundaries: then `content` differs although the bytes are equal.
        return _are_equal(*copies.load([renamed[one], renamed[other]]).values())

    report = checked_plan(
        model, specs, str(stored.version), prefix=prefix, strict=strict, cast=cast, are_equal=are_equal
    )
    needed = [renamed[name] for name in report.loaded if name in renamed]  # the others are tied to these
    fill(model, copies.load(needed, progress=progress))
    return report


def names_below(
    names: Iterable[str],
    prefix: str,
    rename: Mapping[str, str] | None = None,
    *,
    model: torch.nn.Module | None = None,
) -> dict[str, str]:
    """Return the model's name of each tensor below `prefix`, by stored name.

    Names of the module inside a wrapper, such as a compiled `model`, become those of the wrapper. For `rename` see
    `name_filter.map_names`. Raises ConfigError: no tensor is below `prefix`.
    """
    all_names = list(names)
    stem = prefix.rstrip(".")
    prefix_length = len(f"{stem}.") if stem else 0
    unprefixed = {
        name: name[prefix_length:] for name in all_names if is_below(name, prefix) and len(name) > prefix_length
    }
    if not unprefixed and all_names:
        tops = ", ".join(sorted({name.partition(".")[0] for name in all_names})[:10])
        raise ConfigError(
            f"no tensor is below {prefix!r}; the state has: {tops}. Set prefix= to one of these, or to '' for all"
        )
    mapped = map_names(unprefixed.values(), rename)
    wrapped = {} if model is None else _wrapped_names(model)
    return {stored: wrapped.get(mapped[name], mapped[name]) for stored, name in unprefixed.items()}


def _wrapped_names(model: torch.nn.Module) -> dict[str, str]:
    """Return the names of a model's tensors by the names without what wrappers of modules add to them."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    added = [
        f"{name}.{attribute}".lstrip(".")
        for name, module in model.named_modules()
        for attribute in _WRAPPERS
        if attribute in dict(module.named_children())
        and (attribute != "module" or isinstance(module, DataParallel | DistributedDataParallel))
    ]
    names: dict[str, str] = {}
    for name in model.state_dict(keep_vars=True):
        plain = name
        for wrapper in sorted(added, key=len, reverse=True):  # the innermost first: its path has the outer ones
            if is_below(name, wrapper):
                outer = wrapper.rpartition(".")[0]
                plain = f"{outer}.{plain[len(wrapper) + 1 :]}".lstrip(".")
        if plain != name:
            names[plain] = name
    return names


def _hint(found: Iterable[str], prefix: str) -> str:
    """Return advice if all names begin as those of a wrapped module."""
    names, stem = list(found), prefix.rstrip(".")
    while names and (first := names[0].partition(".")[0]) in _WRAPPERS:
        if not all(name.startswith(f"{first}.") for name in names):
            break
        names, stem = [name.partition(".")[2] for name in names], f"{stem}.{first}".lstrip(".")
    return f"the names are those of a compiled or wrapped module: set prefix={stem!r}; or " * (
        stem != prefix.rstrip(".")
    )


def checked_plan(
    model: torch.nn.Module,
    found: Mapping[str, TensorSpec],
    title: str,
    *,
    prefix: str = "",
    strict: bool,
    cast: bool,
    are_equal: Callable[[str, str], bool],
) -> LoadReport:
    """Compare a model with the tensors of a checkpoint. Raises ConfigError: `strict` is set and they differ.

    Arguments are those of `load_into` and `plan_load`; `title` names the checkpoint in messages.
    """
    expected, tied = _describe(model)
    report = plan_load(expected, found, tied, cast=cast, are_equal=are_equal)
    if strict and not report.is_exact:
        raise ConfigError(
            f"{title} does not fit {type(model).__name__}, nothing was loaded: {report}\n"
            f"{_hint(found, prefix)}map names with rename=, convert dtypes with cast=True, or load what fits with "
            "strict=False"
        )
    return report


def fill(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into a model; if that fails, restore the old values.

    Needs CPU memory for a copy of the old values. Raises ConfigError: torch or a hook of the model fails.
    """
    import torch

    current = model.state_dict(keep_vars=True)
    # `_metadata` of a state dict has the format version of each module, and torch converts tensors of old versions.
    # These tensors fit the model, so pass its own `_metadata`: torch then converts nothing.
    state = OrderedDict(tensors)
    state._metadata = getattr(current, "_metadata", None)  # type: ignore[attr-defined] # noqa: SLF001 - torch reads it
    # Check all casts before the first tensor is changed.
    for name, tensor in tensors.items():
        if name in current:
            cast_tensor(name, tensor, current[name].dtype)  # raises if a finite number would become infinite
    # Copy the old values to the CPU, so that no further GPU memory is needed.
    old_values = {name: current[name].detach().to("cpu", copy=True) for name in tensors if name in current}
    try:
        model.load_state_dict(state, strict=False)
    except BaseException as error:
        with torch.no_grad():
            for name, value in old_values.items():
                current[name].copy_(value)
        # torch and hooks of the model raise these types. Other exceptions, such as an interrupt, keep their type.
        if isinstance(error, (RuntimeError, ValueError, TypeError, KeyError)):
            raise ConfigError(f"the tensors cannot be loaded into {type(model).__name__}: {error}") from error
        raise


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes; thus a NaN equals a NaN with the same bits."""
    import torch

    if spec_of(one) != spec_of(other):
        return False
    a, b = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(a, b)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Return the dtype and shape of a tensor."""
    return TensorSpec(dtype_name(tensor), tuple(tensor.shape))


def _describe(model: torch.nn.Module) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Return the tensors of a model by name, and its tied names as the argument `tied` of `plan_load`.

    Raises ConfigError: a tensor has no shape or no memory yet.
    """
    import torch
    from torch.nn.parameter import is_lazy

    expected: dict[str, TensorSpec] = {}
    tied: dict[str, str] = {}
    first_names: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue  # extra state of a module
        if is_lazy(value):
            raise ConfigError(
                f"{type(model).__name__}: {name} has no shape yet; run one batch through the model first"
            )
        if value.is_meta:
            raise ConfigError(
                f"{type(model).__name__}: {name} has no memory yet; call model.to_empty(device=...) first"
            )
        expected[name] = spec_of(value)
        if not is_sharded(value) and not has_memory(value):
            raise ConfigError(
                f"{type(model).__name__}: the values of {name}, a {type(value).__name__}, are in other tensors; "
                "restore with into={...: model.state_dict()}, which fills these"
            )
        memory = memory_of(value)
        # Tied names have the same elements of the same memory. A tensor without memory shows nothing.
        if memory is not None and first_names.setdefault(memory, name) != name:
            tied[name] = first_names[memory]
    return expected, tied
