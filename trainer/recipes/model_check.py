"""Checks that a version fits the model of a run before its tensors are read: by sizes, names, dtypes and shapes.

Afterwards: that the weights are finite.

Tensors alone do not tell models apart: with another number of attention heads, all have the same names and shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch

import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.models.restoring.fit import LoadReport, TensorSpec
from datasvc.models.restoring.load_into_module import spec_of
from datasvc.trainer.recipes.layouts.shard import to_local
from datasvc.trainer.recipes.run import Run

# Key in the configuration of an entry: what the model's method `sizes` returns. Versions of others do not have it.
MODEL_SIZES: Final = "model_sizes"


def check_sizes(run: Run, version: str, entry: Mapping[str, Any], *, but: Collection[str] = (), remedy: str) -> None:
    """Check the sizes that both an entry and the model of this run have, without those of the names `but`.

    Raises:
        ConfigError: a size differs; the message has all of them, the options that make them equal, and `remedy`.
    """
    stored = (entry.get("config") or {}).get(MODEL_SIZES) or {}
    names = [name for name in run.model_sizes if name in stored]
    differing = [name for name in names if stored[name] != run.model_sizes[name] and name not in but]
    if differing:
        options = " ".join(f"{name}={stored[name]}" for name in differing)
        raise ConfigError(
            f"{version} has a model with {_list_sizes(stored, names)}, and the model {run.config.model!r} of this "
            f"run has {_list_sizes(run.model_sizes, names)}; "
            f"build the same one (--model-option {options}), or {remedy}"
        )


def _list_sizes(sizes: Mapping[str, int], names: Collection[str]) -> str:
    return ", ".join(f"{name}={sizes[name]}" for name in names)


def describe_whole_model(
    own: Mapping[str, torch.Tensor], *, name: str
) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Return dtype and shape of the tensors of all ranks by name, and the tied names as `plan_load` takes them.

    Every rank must call this, with the tensors that it has, and with the same `name` for the collective.
    """
    specs, tied = {}, {}
    first_names: dict[int, str] = {}
    for key, value in own.items():
        specs[key] = spec_of(value)
        if first_names.setdefault(id(value), key) != key:
            tied[key] = first_names[id(value)]
    all_specs: dict[str, TensorSpec] = {}
    all_tied: dict[str, str] = {}
    for rank_specs, rank_tied in hvd.allgather_object((specs, tied), name=name):
        all_specs |= rank_specs
        all_tied |= rank_tied
    return all_specs, all_tied


def has_finite_state(run: Run) -> bool:
    """Return whether the weights and the state of the optimizer are finite on all ranks. Every rank calls this."""
    optimizer = run.optimizer
    states = optimizer.states if hasattr(optimizer, "states") else optimizer.state  # that of a layout keeps its own
    values = [value for state in states.values() for value in state.values() if torch.is_tensor(value)]
    flags = [
        to_local(value).isfinite().all().to(run.device)
        for value in (*run.model.parameters(), *values)
        if value.is_floating_point()
    ]
    is_finite = bool(torch.stack(flags).all()) if flags else True
    return bool(
        hvd.allreduce(torch.tensor(int(is_finite), dtype=torch.int64, device="cpu"), name="finite_state", op=hvd.Min)
    )


def describe_misfit(run: Run, version: str, report: LoadReport | Exception) -> str:
    """Return the beginning of an error message that every rank raises; only that of rank 0 lists the differences."""
    details = report if hvd.rank() == 0 else "rank 0 prints the differences"
    return f"{version} does not fit the model {run.config.model!r} of this run: {details}"
