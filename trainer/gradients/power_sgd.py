"""PowerSGD: gradients as products of two thin matrices, from one step of a power iteration (Vogels et al. 2019).

The algorithm, the matrix shapes and the choice of compressed parameters are those of torch's DDP hook. The module
uses the hook's helper functions, but the allreduce of this trainer. Parameters of one dimension are not compressed.

A gradient, as a matrix, is approximated by `left @ right.T`. In each step the ranks sum `left = matrix @ basis`; the
basis is the `right` of the previous step. They orthonormalize the sum, and then reduce `right = matrix.T @ left`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize, _should_compress

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.compression_with_memory import (
    NUM_STEPS,
    CompressionWithMemory,
    Memory,
    count_step,
    keep_residual,
    with_residual,
)
from datasvc.trainer.gradients.gradient_bucket import Bucket, GradientReduction, layout_of, pack, unpack
from datasvc.trainer.job.submit import submit_allreduce

# Name of a value in the memory.
_BASIS = "basis"
# Prevents division by zero, and is far below the norms of gradients.
_SMALLEST_NORM = 1e-30


@dataclass(frozen=True)
class PowerSGD(CompressionWithMemory):
    """Low-rank compression of gradients, with warm start and error feedback.

    Args:
        rank: rank of the approximation: the number of columns of both matrices.
        start_iteration: number of initial steps without compression, because gradients change fast in these steps.
        min_compression_rate: smallest compression ratio at which a parameter is compressed.
        seed: seed of the first basis, which is random because there is no right matrix of an earlier step.

    Raises:
        ValueError: `rank` is below 1, or `start_iteration` below 0.
    """

    rank: int = 1
    start_iteration: int = 1000
    min_compression_rate: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1 or self.start_iteration < 0:
            raise ValueError(f"PowerSGD needs a rank of 1 or more and a start_iteration of 0 or more, not {self}")

    def make_bucket(
        self, name: str, parameters: Mapping[int, Tensor], reduction: GradientReduction, memory: Memory
    ) -> Bucket:
        """Return a bucket that sends factors of the gradients instead of the gradients."""
        return _PowerSGDBucket(name, parameters, reduction, memory, self)

    def shrinks(self, parameter: Tensor) -> bool:
        """Return whether the gradient of the parameter is compressed."""
        if parameter.ndim < 2 or not parameter.numel():
            return False
        num_rows = parameter.shape[0]
        num_columns = parameter.numel() // num_rows
        rank = min(self.rank, num_rows, num_columns)
        is_compressed, _, _ = _should_compress(num_rows, num_columns, rank, self.min_compression_rate)  # type: ignore[no-untyped-call]
        return bool(is_compressed)


@dataclass
class _Factors:
    """The factors of one gradient: `matrix` is approximately `left @ right.T`.

    `matrix` is float[rows, columns], `left` float[rows, rank], `right` float[columns, rank]. They first hold this
    rank's values; `left`, and later `right`, are overwritten by the combined values when the messages arrive.
    """

    matrix: Tensor
    left: Tensor
    right: Tensor


class _PowerSGDBucket(Bucket):
    """A bucket with two messages: the left factors and the uncompressed gradients, then the right factors."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[int, Tensor],
        reduction: GradientReduction,
        memory: Memory,
        settings: PowerSGD,
    ) -> None:
        super().__init__(name, parameters, reduction)
        self._memory = memory
        self._settings = settings
        self._factors: dict[int, _Factors] = {}
        self._uncompressed: dict[int, Tensor] = {}
        self._flat = torch.empty(0, dtype=torch.float32, device="cpu")  # the values of one message

    def send_second(self) -> None:
        self._wait()
        lefts = [factors.left for factors in self._factors.values()]
        unpack(self._flat, [*lefts, *self._uncompressed.values()])
        # Either all ranks return here or none, because they compress the same parameters from the same step on.
        if not self._factors:
            return
        for factors in self._factors.values():
            _orthonormalize(factors.left)
            torch.mm(factors.matrix.t(), factors.left, out=factors.right)
        self._flat = pack([factors.right for factors in self._factors.values()]).mul_(self._scale())
        self._handle = self._submit("right")

    def collect(self) -> None:
        if self._factors:
            self._wait()
            unpack(self._flat, [factors.right for factors in self._factors.values()])
        for position, factors in self._factors.items():
            self._finish_parameter(position, factors)
        for position, gradient in self._uncompressed.items():
            count_step(self._memory[position])
            self._assign(position, gradient)

    def drop(self) -> None:
        super().drop()
        self._factors.clear()
        self._uncompressed.clear()

    def _take(self, position: int) -> None:
        parameter, memory = self.parameters[position], self._memory.setdefault(position, {})
        is_past_start = memory.get(NUM_STEPS, 0) >= self._settings.start_iteration
        if is_past_start and self._settings.shrinks(parameter):
            self._factors[position] = self._factorize(position, with_residual(parameter, memory))
        else:
            self._uncompressed[position] = with_residual(parameter, {}).mul_(self._scale())  # no residual

    def _scale(self) -> float:
        # The scaling factors for before and after the sum, as one: a split would not improve the rounding here.
        return math.prod(self.reduction.factors())

    def _send(self) -> Handle:
        # Order both dicts as the bucket, because gradients become complete in another order on each rank.
        self._factors = {i: self._factors[i] for i in self.parameters if i in self._factors}
        self._uncompressed = {i: self._uncompressed[i] for i in self.parameters if i in self._uncompressed}
        lefts = [factors.left for factors in self._factors.values()]
        self._flat = pack([*lefts, *self._uncompressed.values()])
        return self._submit("left")

    def _submit(self, message: str) -> Handle:
        return submit_allreduce(
            [self._flat],
            [self._flat],
            name=f"{self.name}.{message}",
            op=ReduceOp.SUM,
            is_grouped=True,
            process_set=self.reduction.process_set,
            layout=layout_of(self.parameters.values()),
        )

    def _factorize(self, position: int, gradient: Tensor) -> _Factors:
        """Return the factors of a local gradient. The right one is the basis until the second message replaces it."""
        matrix = gradient.reshape(gradient.shape[0], -1)
        if matrix.dtype not in (torch.float32, torch.float64):
            matrix = matrix.float()
        # Warm start: the right factor of the last step approximates the row space of this gradient too, because
        # gradients of successive steps are similar.
        right = self._basis(position, matrix)
        _orthonormalize(right)
        return _Factors(matrix, matrix @ right, right)

    def _basis(self, position: int, matrix: Tensor) -> Tensor:
        """Return the basis of the last step. If it is missing or zero, return a random basis."""
        # The random basis must be equal on all ranks, because their left factors are summed.
        generator = torch.Generator().manual_seed(hash((self._settings.seed, position)) % 2**63)
        shape = (matrix.shape[1], min(self._settings.rank, *matrix.shape))
        random_basis = torch.randn(shape, generator=generator, dtype=matrix.dtype, device="cpu").to(matrix.device)
        last = self._memory[position].get(_BASIS)
        if last is None or last.shape != random_basis.shape:
            return random_basis
        # Choose on the device, because an `if` would make the host wait for the norm.
        return torch.where(last.norm() > _SMALLEST_NORM, last, random_basis)

    def _finish_parameter(self, position: int, factors: _Factors) -> None:
        """Assign the combined gradient, and store the basis and the residual for the next step."""
        approximation = factors.left @ factors.right.t()
        memory, parameter = self._memory[position], self.parameters[position]
        memory[_BASIS] = factors.right
        # With Sum, the approximation is the sum over all ranks; each rank counts an equal part of it as sent.
        is_sum = self.reduction.op is ReduceOp.SUM
        sent = approximation / self.reduction.process_set.size() if is_sum else approximation
        keep_residual(memory, (factors.matrix - sent).view(parameter.shape).to(parameter.dtype))
        count_step(memory)
        self._assign(position, approximation.view(parameter.shape).to(parameter.dtype))


def _orthonormalize(matrix: Tensor) -> None:
    """Make the columns of the matrix orthonormal, in place."""
    _orthogonalize(matrix.unsqueeze(0), epsilon=_SMALLEST_NORM)  # type: ignore[no-untyped-call]  # untyped in torch
