"""Reduction of quantised gradients: each rank sums one part of a bucket, and sends the sum to all ranks.

An all-reduce cannot add quantised numbers, and the bytes of gathered gradients grow with the number of ranks. So the
ranks exchange parts (all-to-all of quantised numbers), each rank adds up its part in float32, and all ranks gather
the quantised sums. With R ranks a rank sends 2 * (R - 1) / R times the bytes of the packed bucket. All ranks decode
the same bytes, so all have the same gradients.

The error of a codec that rounds to the nearest number is kept as a residual. The rank that adds up a part does not
quantise its own numbers of that part. It keeps the error of the quantised sum as the residual of its part (as in
DoubleSqueeze, Tang et al. 2019), so the invariant of `compression_with_memory` holds for both roundings.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.gradients.codecs import BLOCK, INT4, INT8, ONE_BIT, TERNARY, VOTES, Codec, qsgd
from datasvc.trainer.gradients.compression_with_memory import (
    NUM_STEPS,
    CompressionWithMemory,
    Memory,
    count_step,
    keep_residual,
    with_residual,
)
from datasvc.trainer.gradients.gradient_bucket import Bucket, GradientReduction, layout_of
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import members_of
from datasvc.trainer.job.submit import submit_allgather, submit_alltoall

_CODECS: Mapping[str, Codec] = {
    "int8": INT8,
    "int4": INT4,
    "ternary": TERNARY,
    "onebit": ONE_BIT,
    "signsgd": VOTES,
}


@dataclass(frozen=True)
class Quantized(CompressionWithMemory):
    """Compression that sends each number of a gradient in 1 to 8 bits; its bytes do not grow with the ranks.

    A step fails if a rank has joined (it has no more data).

    Args:
        codec: "int8", "int4": the nearest of 255 or 15 equally spaced numbers; "onebit": one of two numbers; these
            three have error feedback. "ternary" (TernGrad), "qsgd": rounded at random, unbiased, without error
            feedback. "signsgd": the sign that most ranks have, for Sum as for Average, so the learning rate is the
            size of a step.
        levels: levels of "qsgd" above zero, an integer from 1 to 127; 2 bits for 1, 4 up to 7, 8 above.
        seed: seed of the random rounding.

    Raises:
        ValueError: there is no such codec, or `levels` is out of range.
    """

    codec: str = "int8"
    levels: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        if self.codec != "qsgd" and self.codec not in _CODECS:
            raise ValueError(f"the codecs of gradients are {', '.join(_CODECS)} and qsgd, not {self.codec!r}")
        if type(self.levels) is not int or not 1 <= self.levels <= 127:
            raise ValueError(f"qsgd has 1 to 127 levels, not {self.levels!r}")

    def find_codec(self) -> Codec:
        """Return the codec."""
        return qsgd(self.levels) if self.codec == "qsgd" else _CODECS[self.codec]

    def make_bucket(
        self, name: str, parameters: Mapping[int, Tensor], reduction: GradientReduction, memory: Memory
    ) -> Bucket:
        """Return a bucket that sends quantised gradients. Raises ValueError: a parameter is complex."""
        if any(parameter.is_complex() for parameter in parameters.values()):
            raise ValueError(f"{self} sends real gradients only; use another compression for complex parameters")
        return _QuantizedBucket(name, parameters, reduction, memory, self)


class _QuantizedBucket(Bucket):
    """A bucket with two messages: quantised parts for the ranks that add them up, then the quantised sums."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[int, Tensor],
        reduction: GradientReduction,
        memory: Memory,
        settings: Quantized,
    ) -> None:
        super().__init__(name, parameters, reduction)
        self._memory = memory
        self._settings = settings
        self._codec = settings.find_codec()
        self._is_vote = self._codec is VOTES
        self._keeps_errors = not (self._codec.is_random or self._is_vote)
        self._taken: dict[int, Tensor] = {}  # by position: the gradient plus its residual, flat
        # Blocks of this step, float32[blocks, BLOCK]: what this rank has, and then what it has not sent.
        self._blocks = torch.empty(0, BLOCK, dtype=torch.float32, device="cpu")

    def send_second(self) -> None:
        received = self._codec.unpack(self._wait())
        own = self._own_blocks()
        parts = received.view(self._num_ranks, -1, BLOCK)
        if not self._is_vote:
            parts[self._index] = own
        total = parts.sum(0)
        packed = self._pack(total, message=1)
        if self._keeps_errors:
            own.copy_(total - self._codec.unpack(packed))
        self._handle = submit_allgather(
            [packed],
            name=f"{self.name}.sums",
            is_grouped=True,
            process_set=self.reduction.process_set,
            layout=layout_of(self.parameters.values()),
            round=self.reduction.round,
        )

    def collect(self) -> None:
        (packed,) = self._wait()
        sums = self._codec.unpack(packed)
        if not self._is_vote:
            sums *= math.prod(self.reduction.factors())
        lengths = [parameter.numel() for parameter in self.parameters.values()]
        # The last part is what fills the last block.
        lengths.append(sums.numel() - sum(lengths))
        kept = torch.split(self._blocks.view(-1), lengths)
        for (position, parameter), part, rest in zip(
            self.parameters.items(), torch.split(sums.view(-1), lengths)[:-1], kept[:-1], strict=True
        ):
            memory = self._memory[position]
            count_step(memory)
            if self._keeps_errors:
                keep_residual(memory, rest.view(parameter.shape).to(parameter.dtype, copy=True))
            self._assign(position, part.view(parameter.shape).to(parameter.dtype))

    def drop(self) -> None:
        super().drop()
        self._taken.clear()
        self._blocks = self._blocks.new_empty(0, BLOCK)

    def _take(self, position: int) -> None:
        memory = self._memory.setdefault(position, {})
        taken = with_residual(self.parameters[position], memory if self._keeps_errors else {})
        self._taken[position] = taken.reshape(-1).float()

    def _send(self) -> Handle:
        members = members_of(self.reduction.process_set)
        self._num_ranks, self._index = len(members), members.index(runtime.rank())
        values = [self._taken[position] for position in self.parameters]
        num_blocks = max(1, math.ceil(sum(map(len, values)) / (BLOCK * self._num_ranks))) * self._num_ranks
        flat = torch.zeros(num_blocks * BLOCK, dtype=torch.float32, device=values[0].device)
        num_values = sum(map(len, values))
        torch.cat(values, out=flat[:num_values])
        if num_values % BLOCK and not self._codec.is_random:
            # Zeros would change the means of "onebit", so fill the last block with its own numbers. They would
            # increase the norm of "qsgd".
            last = flat[num_values - num_values % BLOCK :][:BLOCK]
            last[:] = last[torch.arange(BLOCK, device=flat.device) % (num_values % BLOCK)]
        self._blocks = flat.view(num_blocks, BLOCK)
        packed = self._pack(self._blocks, message=0)
        if self._keeps_errors:
            own = self._own_blocks().clone()
            self._blocks -= self._codec.unpack(packed)
            self._own_blocks().copy_(own)  # not sent: this rank adds it to the sum as it is
        reduction = self.reduction
        return submit_alltoall(
            packed,
            None,
            name=f"{self.name}.parts",
            process_set=reduction.process_set,
            layout=layout_of(self.parameters.values()),
            round=reduction.round,
        )

    def _own_blocks(self) -> Tensor:
        """Return the part that this rank adds up, as a view."""
        return self._blocks.view(self._num_ranks, -1, BLOCK)[self._index]

    def _pack(self, values: Tensor, *, message: int) -> Tensor:
        if not self._codec.is_random:
            return self._codec.pack(values, values)
        # Other random numbers on each rank and in each step; a run that continues a checkpoint has those of its step.
        position = next(iter(self.parameters))
        num_steps = self._memory[position].get(NUM_STEPS, 0)
        key = f"{self._settings.seed} {position} {num_steps} {self._index} {message}".encode()
        generator = torch.Generator(values.device).manual_seed(zlib.crc32(key))
        return self._codec.pack(values, torch.rand(values.shape, generator=generator, device=values.device))
