"""Flattens the state that one rank saves into named tensors and a JSON skeleton, and checks that both can be stored.

`CheckpointManager.save` calls `flatten_state` before it copies the tensors. Therefore `save` itself raises an error
about the state, not the background write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

from datasvc.errors import ConfigError
from datasvc.models.tensors.dtypes import check_storable, dtype_name
from datasvc.models.tensors.state_tree import flatten

if TYPE_CHECKING:
    import torch

RANK_STATE: Final = "rank_state"
"""Key of the restored state that holds a list with the state of each rank."""


@dataclass(frozen=True)
class FlatState:
    """The flattened state of one rank: the state that all ranks share, and the state that only this rank has.

    Attributes:
        skeleton: skeleton of the state that all ranks share, see `state_tree`.
        tensors: tensors of the shared state, by name.
        rank_skeleton: skeleton of the state that only this rank has; None: this rank has no state of its own.
        rank_tensors: tensors of this rank's own state, by name; no other rank has tensors of these names.
    """

    skeleton: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    rank_skeleton: Any
    rank_tensors: Mapping[str, torch.Tensor]

    @property
    def all_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return {**self.tensors, **self.rank_tensors}

    @property
    def signature(self) -> list[str]:
        """Name, dtype and shape of each shared tensor, sorted by name; must be equal on all ranks."""
        return [f"{name} {dtype_name(tensor)}{list(tensor.shape)}" for name, tensor in sorted(self.tensors.items())]

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return this state with other tensors under the same names; `tensors` must have all of these names."""
        return replace(
            self,
            tensors={name: tensors[name] for name in self.tensors},
            rank_tensors={name: tensors[name] for name in self.rank_tensors},
        )


def flatten_state(state: Mapping[str, Any], rank_state: Mapping[str, Any] | None, rank: int) -> FlatState:
    """Flatten the shared `state` and `rank_state`, the state of this rank alone.

    Raises ConfigError: a value or a name of a tensor cannot be stored.
    """
    if RANK_STATE in state:
        raise ConfigError(
            f"the state has the reserved key {RANK_STATE!r}: pass the state of each rank as rank_state="
        )
    skeleton, tensors = flatten(state)
    # `join_parts` adds the key `RANK_STATE` to the skeleton. A dict with a key that is not a string, or that begins
    # with "$", is encoded as a list under the single key "$dict", so no key can be added to it.
    if rank_state is not None and "$dict" in skeleton:
        raise ConfigError("with a rank_state, all keys of the state must be strings that do not begin with '$'")
    rank_skeleton: Any = None
    rank_tensors: Mapping[str, torch.Tensor] = {}
    if rank_state is not None:
        # The path contains the rank's number, so that tensors of different ranks have different names.
        full_skeleton, rank_tensors = flatten({RANK_STATE: {str(rank): rank_state}})
        rank_skeleton = full_skeleton[RANK_STATE][str(rank)]
    for name in tensors.keys() & rank_tensors.keys():
        raise ConfigError(f"two tensors of the state are called {name!r}; rename one of the keys")
    flat_state = FlatState(skeleton, tensors, rank_skeleton, rank_tensors)
    for name, tensor in flat_state.all_tensors.items():
        check_storable(name, tensor)
    return flat_state


def describe_mismatch(signatures: Sequence[Sequence[str]]) -> str:
    """Return a message about the first rank whose tensor signature differs from that of rank 0.

    At least one must differ.
    """
    first = set(signatures[0])
    for rank, signature in enumerate(signatures):
        missing, extra = sorted(first - set(signature)), sorted(set(signature) - first)
        if missing or extra:
            expected = missing[0] if missing else "nothing"
            found = extra[0] if extra else "nothing"
            return (
                f"rank {rank} saves other tensors than rank 0: rank 0 has {expected!r} where rank {rank} has "
                f"{found!r}; pass the state of each rank as rank_state=, and save sharded tensors with "
                "datasvc.models.dcp"
            )
    raise AssertionError("the signatures do not differ")
