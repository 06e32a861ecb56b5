"""Memory of a rank: parameters, gradients, optimizer state, gathered parameters and activations.

ZeRO stages are those of Rajbhandari et al. 2020 (arXiv:1910.02054): stage 1 divides the optimizer's state over the
ranks of the axis `shard`, stage 2 also the gradients, stage 3 also the parameters.

Schedules of pipelines: GPipe (Huang et al. 2019, arXiv:1811.06965), 1F1B and interleaved 1F1B (Narayanan et al. 2021,
arXiv:2104.04473), ZB-V (Qi et al. 2023, arXiv:2401.10241). Symbols: p ranks, m micro-batches, v stages of a rank.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from datasvc.errors import ConfigError
from datasvc.planning.candidates import Candidate
from datasvc.planning.layout import stages_per_rank
from datasvc.planning.model_costs import FLOAT32_BYTES, ModelCosts
from datasvc.sizes import format_size

_ELEMENT_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}
# Float32 numbers of state for each parameter.
_MOMENTS: Final = {"sgd": 1, "lars": 1, "lamb": 2, "adamw": 2, "rmsprop-sgd": 2}
_GATHERED_BLOCKS: Final = 2  # the block that computes, and the next one, which is prefetched


@dataclass(frozen=True)
class StateBytes:
    """Bytes that training needs for each parameter, without activations.

    Attributes:
        parameter: the parameter itself.
        gradient: its gradient.
        optimizer: the state of the optimizer, with a float32 copy of the parameter if there is one.
        cast: a copy of the parameter in the precision of the computation; 0 without one.
    """

    parameter: float
    gradient: float
    optimizer: float
    cast: float = 0.0


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank by what they hold.

    Attributes:
        parameters: the rank's parameters.
        gradients: their gradients.
        optimizer: state of the optimizer.
        gathered: parameters of other ranks, or casts of parameters, that the rank holds for the computation.
        activations: results of the forward pass that the backward pass needs.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float

    @property
    def total(self) -> float:
        """Sum of all."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations

    def describe(self) -> str:
        """Return the parts that are not empty: "parameters 1.50 GB, gradients 1.50 GB, ..."."""
        parts = dataclasses.asdict(self)
        return ", ".join(f"{name} {format_size(size_bytes)}" for name, size_bytes in parts.items() if size_bytes)


def state_bytes(optimizer: str, precision: str, *, momentum: float = 0.9) -> StateBytes:
    """Return the bytes per parameter of the training program: weights, gradients and moments are float32.

    Args:
        optimizer: name of the optimizer.
        precision: "fp32", "bf16" or "fp16"; mixed precision casts the weights for the computation.
        momentum: momentum of SGD, which has no state at 0.
    """
    moments = 0 if optimizer == "sgd" and not momentum else _MOMENTS[optimizer]
    cast = 0 if precision == "fp32" else _ELEMENT_BYTES[precision]
    return StateBytes(FLOAT32_BYTES, FLOAT32_BYTES, moments * FLOAT32_BYTES, cast)


def element_bytes(precision: str) -> int:
    """Return the bytes of one element of an activation."""
    return _ELEMENT_BYTES[precision]


def estimate_memory(costs: ModelCosts, candidate: Candidate, states: StateBytes, *, precision: str) -> RankMemory:
    """Return the memory of the rank that needs most.

    Args:
        costs: costs of the model.
        candidate: layout and settings; its pipeline divides the blocks.
        states: bytes per parameter.
        precision: precision of the activations.
    """
    layout = candidate.layout
    ranks = divide_parts(costs.layers, layout.pipeline, candidate.schedule)
    # The ranks between these two have as many blocks as the first, and hold fewer micro-batches.
    ends = {0, layout.pipeline - 1}
    memories = [_rank_memory(costs, candidate, states, precision, ranks[rank], rank) for rank in ends]
    return max(memories, key=lambda memory: memory.total)


def rank_parameters(costs: ModelCosts, parts: RankParts, tensor: int) -> float:
    """Return the number of parameters of a rank of a pipeline and of a tensor group; `shard` divides them further."""
    count = parts.blocks * costs.block.parameters_on_rank(tensor)
    if parts.has_first:
        count += costs.first.parameters_on_rank(tensor)
    if parts.has_last:
        count += costs.last.parameters_on_rank(tensor)
        # The weights that the logits share with the embedding are on both ranks.
        count += 0 if parts.has_first else costs.tied_parameters
    return count


def divide_states(states: StateBytes, shard: int, zero: int) -> StateBytes:
    """Return the bytes per parameter on a rank of a shard group of `shard` ranks at a ZeRO stage of 0 to 3."""
    if zero not in range(4):
        raise ConfigError(f"zero is {zero}; expected a stage of 0, 1, 2 or 3")
    return StateBytes(
        parameter=states.parameter / (shard if zero >= 3 else 1),
        gradient=states.gradient / (shard if zero >= 2 else 1),
        optimizer=states.optimizer / (shard if zero >= 1 else 1),
        cast=states.cast,
    )


def _rank_memory(
    costs: ModelCosts, candidate: Candidate, states: StateBytes, precision: str, parts: RankParts, rank: int
) -> RankMemory:
    count = rank_parameters(costs, parts, candidate.layout.tensor)
    divided = divide_states(states, candidate.num_shards, candidate.zero)
    num_held = held_micro_batches(candidate.schedule, rank, candidate.layout.pipeline, candidate.num_micro_batches)
    return RankMemory(
        # All of them under ZeRO-2 too: FSDP2 then stores them in parts, but gathers all for a step.
        parameters=count * divided.parameter,
        # A pipeline adds the gradients of its micro-batches before it reduces them.
        gradients=count * (divided.gradient if candidate.layout.pipeline == 1 else states.gradient),
        optimizer=count * divided.optimizer,
        gathered=_gathered_bytes(costs, candidate, states, parts, count),
        activations=_activation_bytes(costs, candidate, element_bytes(precision), parts, num_held),
    )


def _gathered_bytes(
    costs: ModelCosts, candidate: Candidate, states: StateBytes, parts: RankParts, count: float
) -> float:
    gathered = 0.0
    if candidate.zero == 3:
        # The parts outside the blocks are one unit, which stays gathered while the blocks compute.
        num_freed = max(0, parts.blocks - _GATHERED_BLOCKS)
        gathered = count - num_freed * costs.block.parameters_on_rank(candidate.layout.tensor)
    # The casts of a forward pass are kept for its backward pass.
    return gathered * states.parameter + count * states.cast


def _activation_bytes(
    costs: ModelCosts, candidate: Candidate, size_of_element: int, parts: RankParts, num_held: float
) -> float:
    """Return the bytes of activations of a rank that holds `num_held` micro-batches at the same time."""
    layout = candidate.layout
    block_bytes = costs.block.activation_bytes(size_of_element, layout.tensor) / layout.context
    if layout.context > 1 and costs.heads is not None:
        # Each rank of a context group keeps the keys and values of all tokens.
        block_bytes += 2 * costs.boundary_elements / layout.tensor * size_of_element * (1 - 1 / layout.context)
    # Per sample: `held_bytes` for each held micro-batch, `once_bytes` for the one in its backward pass.
    if candidate.recompute:
        # The input of each block is kept, and all activations of the one block that is computed again.
        held_bytes = parts.blocks * costs.boundary_elements * size_of_element / layout.context
        once_bytes = block_bytes
    else:
        held_bytes, once_bytes = parts.blocks * block_bytes, 0.0
    if parts.has_first:
        held_bytes += costs.first.activation_bytes(size_of_element) / layout.context
    if parts.has_last:
        # GPipe runs all forward passes first. With other schedules, the last rank holds its last part for one pass.
        last_bytes = costs.last.activation_bytes(size_of_element) / layout.context
        if candidate.schedule == "gpipe":
            held_bytes += last_bytes
        else:
            once_bytes += last_bytes
    return candidate.micro_batch * (held_bytes * num_held + once_bytes)


@dataclass(frozen=True)
class RankParts:
    """The parts of the model that a rank of a pipeline has.

    Attributes:
        blocks: number of blocks.
        has_first: whether it has the part before the blocks.
        has_last: whether it has the part after the blocks, and the loss.
    """

    blocks: int
    has_first: bool
    has_last: bool


def divide_parts(layers: int, pipeline: int, schedule: str) -> list[RankParts]:
    """Return the parts of each rank of a pipeline, in order, with equal numbers of blocks.

    `pipeline` times the stages of a rank must divide `layers`. Under ZB-V the stages go down the ranks and back up,
    so that the first rank has the first and the last part of the model.
    """
    last = 0 if schedule == "zbv" else pipeline - 1
    return [RankParts(layers // pipeline, rank == 0, rank == last) for rank in range(pipeline)]


def held_micro_batches(schedule: str, rank: int, pipeline: int, num_micro_batches: int) -> float:
    """Return the largest number of micro-batches whose activations a rank holds at the same time.

    The activations of one of its v stages count as 1/v. Without a pipeline the number is 1.
    """
    if pipeline == 1:
        return 1
    match schedule:
        case "gpipe":
            return num_micro_batches
        case "interleaved":
            # The warm-up of Narayanan et al.: 2 (p - rank - 1) + (v - 1) p forward passes of stages, and one more.
            num_stages = stages_per_rank(schedule)
            held = 2 * (pipeline - rank - 1) + (num_stages - 1) * pipeline + 1
            return min(held / num_stages, num_micro_batches)
        case "zbv":
            return min(pipeline, num_micro_batches)
    return min(pipeline - rank, num_micro_batches)
