"""Checks the names and groups that a user gives for the parameters of an optimizer, for `DistributedOptimizer`.

The position of a parameter is its index in `parameters_of(optimizer)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from datasvc.trainer.gradients.bucket_choice import cut_evenly
from datasvc.trainer.job.process_sets import ProcessSet
from datasvc.trainer.optim.broadcast_state import allgather_object, broadcast_object

Groups = int | Sequence[Sequence[Tensor]] | None
"""The parameters that are sent together: a number of groups, lists of parameters, or None for groups by size."""


_counts: Counter[str] = Counter()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer, in the order of its parameter groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Return the name of each parameter: the user's name, or one made from the position of the parameter.

    Raises:
        ValueError: `named_parameters` are not pairs, have a name twice, or lack a parameter of the optimizer.
    """
    parameters = parameters_of(optimizer)
    if named_parameters is None:
        return {parameter: f"parameter {i}" for i, parameter in enumerate(parameters)}
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), "
            "usually produced by model.named_parameters()"
        )
    names = [name for name, _ in pairs]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f"parameter names in named_parameters must be unique; found twice: {', '.join(duplicates)}")
    name_of = {parameter: name for name, parameter in pairs}
    num_unnamed = sum(parameter not in name_of for parameter in parameters)
    if num_unnamed:
        raise ValueError(f"named_parameters was given, but it lacks {num_unnamed} of the optimizer's parameters")
    return name_of


def check_groups(groups: Groups) -> None:
    """Check the `groups` argument of `DistributedOptimizer`.

    Raises:
        ValueError: `groups` is negative, contains something other than tensors, or contains a tensor twice.
    """
    if groups is None:
        return
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups must be a number of at least 0, or lists of tensors, not {groups}")
        return
    tensors = [tensor for group in groups for tensor in group]
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ValueError("groups must be a number of at least 0, or lists of tensors")
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise ValueError("groups contain a parameter twice; list each parameter once")


def place_groups(
    groups: Groups, parameters: Sequence[Tensor], names: Mapping[Tensor, str], process_set: ProcessSet
) -> list[list[int]]:
    """Return the positions of the parameters of each group.

    If `groups` is a number above 0, this is a collective, in which all ranks adopt the order of the set's first rank.

    Args:
        groups: number of groups of consecutive parameters, or lists of parameters. Parameters that are not in
            `parameters` are ignored.
        parameters: parameters of the optimizer.
        names: name of each parameter.
        process_set: ranks that take part.
    """
    # Compare by identity, because `==` of tensors compares their values.
    positions = {id(parameter): position for position, parameter in enumerate(parameters)}
    if isinstance(groups, int):
        if groups == 0:
            return []
        by_name = {names[parameter]: position for position, parameter in enumerate(parameters)}
        # Ranks may list their parameters in different orders, but the groups must be equal.
        first_rank = (process_set.ranks or [0])[0]
        order = broadcast_object(list(by_name), first_rank, "optimizer.groups", process_set)
        return cut_evenly([by_name[name] for name in order if name in by_name], groups)
    return [[positions[id(tensor)] for tensor in group if id(tensor) in positions] for group in groups or ()]


# An object must have the same number on all ranks. The numbers count creations, not live objects, because garbage
# collection happens at different times on different ranks. In an elastic job, ranks that start later have created
# fewer objects, so all ranks raise their counts to the maximum whenever they synchronize their states.


def next_number(kind: str) -> int:
    """Return the number of a new object of a kind, such as "adasum"; every rank calls this in the same order.

    Each kind is numbered from 0.
    """
    number = _counts[kind]
    _counts[kind] += 1
    return number


def raise_counts() -> None:
    """Raise the counts to the maximum over the ranks. A collective: every rank calls this."""
    for counts in allgather_object(dict(_counts), name="wrapper_numbers"):
        for kind, count in counts.items():
            _counts[kind] = max(_counts[kind], count)
