"""Flattens the state that one rank saves into named tensors and a JSON skeleton, and checks that both can be stored.

Of a sharded tensor (DTensor), a flattened state has the part of this rank.

`CheckpointManager.save` calls `flatten_state` before it copies the tensors. Therefore `save` itself raises an error
about the state, not the background write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Self

from datasvc.errors import ConfigError
from datasvc.models.saving.shared_plan import HeldTensor, SharedPlan, outline, plan_replicas
from datasvc.models.tensors.chunks import Box, plan_part_chunks, slices
from datasvc.models.tensors.container_types import untyped
from datasvc.models.tensors.dtypes import check_storable, dtype_name
from datasvc.models.tensors.state_tree import flatten
from datasvc.models.tensors.tensor_classes import is_sharded, local_part
from datasvc.models.tensors.tensor_table import ITEM_BYTES
from datasvc.models.tensors.write import TensorBlock, whole_blocks

if TYPE_CHECKING:
    import torch

RANK_STATE: Final = "rank_state"
"""Key of the restored state that holds a list with the state of each rank."""


@dataclass(frozen=True)
class FlatState:
    """The flattened state of one rank: the state that all ranks share, and the state that only this rank has.

    Attributes:
        skeleton: skeleton of the shared state, see `state_tree`.
        tensors: tensors of the shared state, by name; of a sharded tensor, the part of this rank.
        rank_skeleton: skeleton of the state that only this rank has; None: this rank has no state of its own.
        rank_tensors: tensors of this rank's own state, by name; no other rank has tensors of these names.
        parts: of each sharded tensor in `tensors`, the dtype and shape of the whole and the box of this rank's part.
        plan: which ranks hold which blocks of the shared tensors; None: all ranks hold the same whole tensors.
    """

    skeleton: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    rank_skeleton: Any
    rank_tensors: Mapping[str, torch.Tensor]
    parts: Mapping[str, HeldTensor] = field(default_factory=dict)
    plan: SharedPlan | None = None

    @property
    def all_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return {**self.tensors, **self.rank_tensors}

    @property
    def held(self) -> dict[str, HeldTensor]:
        """What this rank holds of the shared tensors, by name."""
        whole = {
            name: HeldTensor(dtype_name(tensor), tuple(tensor.shape), ((0,) * tensor.dim(), tuple(tensor.shape)))
            for name, tensor in self.tensors.items()
            if name not in self.parts
        }
        # A tensor without elements has no box.
        held = {
            name: tensor if 0 not in tensor.shape else tensor._replace(box=None) for name, tensor in whole.items()
        }
        return {**held, **self.parts}

    @property
    def descriptions(self) -> tuple[str, str]:
        """Two texts that are equal on ranks that hold the same boxes of the same tensors, and have the same keys."""
        held = [[name, *tensor] for name, tensor in sorted(self.held.items())]
        return json.dumps(held), json.dumps(outline(self.skeleton), sort_keys=True)

    def planned(self, num_ranks: int) -> SharedPlan:
        """Return `plan`, or the plan of whole tensors on all of `num_ranks`."""
        if self.plan is not None:
            return self.plan
        return plan_replicas({name: held[:2] for name, held in self.held.items()}, num_ranks)

    def block(self, name: str, box: Box) -> TensorBlock:
        """Return a block of a shared tensor as a view; this rank must hold it."""
        part = self.parts.get(name)
        origin = None if part is None or part.box is None else part.box[0]
        return TensorBlock(name, box[0], self.tensors[name][slices(box, origin=origin)])

    def chunks(self) -> list[TensorBlock]:
        """Return all tensors of this rank, divided into the chunks in which the ranks store them."""
        shared = [
            self.block(name, box)
            for name, held in self.held.items()
            if held.box is not None
            for box in plan_part_chunks(held.box, held.shape, ITEM_BYTES[held.dtype])
        ]
        return shared + whole_blocks(self.rank_tensors)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return this state with other tensors under the same names; `tensors` must have all of these names."""
        return replace(
            self,
            tensors={name: tensors[name] for name in self.tensors},
            rank_tensors={name: tensors[name] for name in self.rank_tensors},
        )


def flatten_state(state: Mapping[str, Any], rank_state: Mapping[str, Any] | None, rank: int) -> FlatState:
    """Flatten the shared `state` and `rank_state`, the state of this rank alone.

    Raises ConfigError: a value or a name of a tensor cannot be stored; `rank_state` has a sharded tensor.
    """
    if RANK_STATE in state:
        raise ConfigError(
            f"the state has the reserved key {RANK_STATE!r}: pass the state of each rank as rank_state="
        )
    skeleton, tensors = flatten(state)
    # `join_parts` adds the key `RANK_STATE` to the skeleton. A dict with a key that is not a string, or that begins
    # with "$", is encoded as a list under the single key "$dict", so no key can be added to it.
    if rank_state is not None and "$dict" in untyped(skeleton):
        raise ConfigError("with a rank_state, all keys of the state must be strings that do not begin with '$'")
    rank_skeleton: Any = None
    rank_tensors: Mapping[str, torch.Tensor] = {}
    if rank_state is not None:
        # The path contains the rank's number, so that tensors of different ranks have different names.
        full_skeleton, rank_tensors = flatten({RANK_STATE: {str(rank): rank_state}})
        rank_skeleton = full_skeleton[RANK_STATE][str(rank)]
    for name in tensors.keys() & rank_tensors.keys():
        raise ConfigError(f"two tensors of the state are called {name!r}; rename one of the keys")
    parts: dict[str, HeldTensor] = {}
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            tensors[name], box = local_part(name, tensor)
            held = HeldTensor(dtype_name(tensor), tuple(tensor.shape), box)
            # A rank that holds the whole tensor, such as a replica, needs no part.
            if box is None or box[1] != held.shape:
                parts[name] = held
    flat_state = FlatState(skeleton, tensors, rank_skeleton, rank_tensors, parts)
    for name, tensor in flat_state.all_tensors.items():
        check_storable(name, tensor)
    return flat_state
