"""What one rank has to save: a state tree taken apart, checked before anything is copied or stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

from datasvc.errors import ConfigError
from datasvc.models.tensors.dtypes import check_storable, dtype_name
from datasvc.models.tensors.state_tree import flatten
from datasvc.repository import Digest
from datasvc.repository.objects.objects import digest_of

if TYPE_CHECKING:
    import torch

RANK_STATE: Final = "rank_state"
"""Key of the whole state under which a list has the ranks' own."""


@dataclass(frozen=True)
class FlatState:
    """A state, taken apart.

    Attributes:
        skeleton: of the state that all ranks have, see `tree`.
        tensors: of it, by name.
        own_skeleton: of what is this rank's own; None: nothing is.
        own_tensors: of that, by names that no other rank uses.
    """

    skeleton: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    own_skeleton: Any
    own_tensors: Mapping[str, torch.Tensor]

    @property
    def all_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return {**self.tensors, **self.own_tensors}

    @property
    def form(self) -> list[str]:
        """What the ranks must have alike: name, dtype and shape of each common tensor."""
        return [f"{name} {dtype_name(each)}{list(each.shape)}" for name, each in sorted(self.tensors.items())]

    @property
    def form_digest(self) -> Digest:
        """Equal where forms are."""
        return digest_of("\n".join(self.form).encode())

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return the same content with other tensors under the names."""
        return replace(
            self,
            tensors={name: tensors[name] for name in self.tensors},
            own_tensors={name: tensors[name] for name in self.own_tensors},
        )


def flatten_state(state: Mapping[str, Any], rank_state: Mapping[str, Any] | None, rank: int) -> FlatState:
    """Return what is to be saved of a state and of what is this rank's own.

    Raises:
        ConfigError: a value cannot be stored; names it and says what to do.
    """
    if RANK_STATE in state:
        raise ConfigError(f"{RANK_STATE!r} is no key of a state: give what is each rank's own as rank_state=")
    skeleton, tensors = flatten(state)
    if rank_state is not None and "$dict" in skeleton:
        raise ConfigError("beside a rank_state, all keys of the state must be texts that do not begin with '$'")
    own_skeleton: Any = None
    own_tensors: Mapping[str, torch.Tensor] = {}
    if rank_state is not None:
        whole, own_tensors = flatten({RANK_STATE: {str(rank): rank_state}})
        own_skeleton = whole[RANK_STATE][str(rank)]
    for name in tensors.keys() & own_tensors.keys():
        raise ConfigError(f"two tensors of the state are called {name!r}; rename one of its keys")
    content = FlatState(skeleton, tensors, own_skeleton, own_tensors)
    for name, tensor in content.all_tensors.items():
        check_storable(name, tensor)
    return content


def describe_mismatch(forms: Sequence[Sequence[str]]) -> str:
    """Return in what the forms of several ranks differ, of which some do."""
    first = set(forms[0])
    for rank, form in enumerate(forms):
        missing, more = sorted(first - set(form)), sorted(set(form) - first)
        if missing or more:
            here, there = (each[0] if each else "nothing" for each in (missing, more))
            return (
                f"rank {rank} saves other tensors than rank 0: where rank 0 has {here!r} it has {there!r}; give what "
                "is each rank's own as rank_state=, and sharded tensors to datasvc.models.dcp"
            )
    raise AssertionError("some differ")
