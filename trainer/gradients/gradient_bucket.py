"""Gradient buckets: gradients that are sent together, usually as views of one flat tensor.

Invariant: in every step each rank sends each bucket exactly once, with zeros for gradients that it does not have.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set, members_of
from datasvc.trainer.job.submit import submit_allreduce


@dataclass(frozen=True, kw_only=True)
class GradientReduction:
    """The reduction of gradients, and the ranks that take part.

    Attributes:
        op: reduction over the ranks.
        predivide_factor: with Average, gradients are divided by this number before the sum, and the sum is divided by
            `size / predivide_factor`, with `size` ranks. But 1 divides by `size` before the sum, and not after it.
        process_set: ranks that take part.
        round: round of outer gradients, compared between the ranks (dense and quantised buckets), see `Request`.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    predivide_factor: float = 1.0
    process_set: ProcessSet = global_process_set
    round: str = ""

    def factors(self) -> tuple[float, float]:
        """Return two factors: one for the gradients before the sum, and one for the sum."""
        if self.op is not ReduceOp.AVERAGE:
            return 1.0, 1.0
        size = len(members_of(self.process_set))
        # The division before the sum is part of the copy into the bucket. A division after it would need another pass
        # over memory.
        if self.predivide_factor == 1.0:
            return 1.0 / size, 1.0
        return 1.0 / self.predivide_factor, self.predivide_factor / size

    @property
    def op_on_wire(self) -> ReduceOp:
        """The reduction to submit: Sum for Average, because `factors` include the division."""
        return ReduceOp.SUM if self.op is ReduceOp.AVERAGE else self.op


class Bucket(ABC):
    """A group of gradients that is sent as soon as all of them are complete, or on `launch`.

    Args:
        name: name of the operation; the same on every rank, and unique among the operations in progress.
        parameters: parameters by position, see `bucket_choice`; the same on every rank, in the same order.
        reduction: reduction, the same on every rank.
    """

    def __init__(self, name: str, parameters: Mapping[int, Tensor], reduction: GradientReduction) -> None:
        self.name = name
        self.parameters = dict(parameters)
        self.reduction = reduction
        self.is_launched = False  # whether the bucket was sent in this step
        self._filled: set[int] = set()  # positions of the gradients that were added in this step
        self._handle: Handle | None = None

    def add(self, position: int) -> None:
        """Add a gradient that is complete on this rank; send the bucket after the last one."""
        self._take(position)
        self._filled.add(position)
        self.launch_if_complete()

    def launch_if_complete(self) -> None:
        """Send the bucket if all gradients have been added."""
        if len(self._filled) == len(self.parameters):
            self.launch()

    def exclude(self, position: int) -> None:
        """Remove a parameter whose gradient has not been added; all ranks remove it in the same step."""
        assert not self.is_launched
        del self.parameters[position]

    def launch(self) -> None:
        """Send the bucket, with zeros for missing gradients."""
        # This rank did not use the remaining parameters in the step, but the other ranks expect the whole bucket.
        for position in self.parameters.keys() - self._filled:
            self._take(position)
        self.is_launched = True
        self._handle = self._send()

    def send_second(self) -> None:  # noqa: B027 - not abstract, because most buckets have one message
        """Send the second message, if this kind of bucket has two; called before `collect`."""

    @abstractmethod
    def collect(self) -> None:
        """Wait for the operation, and store the reduced gradients in `grad`."""

    def drop(self) -> None:
        """Wait for the operation in progress, and discard its result and the added gradients."""
        if self._handle is not None:
            self._handle.settle()
        self._handle = None
        self.is_launched = False
        self._filled.clear()

    @abstractmethod
    def _take(self, position: int) -> None:
        """Copy or encode the gradient of a parameter for `_send`; zeros if the parameter has none."""

    @abstractmethod
    def _send(self) -> Handle:
        """Begin the operation. Every parameter has been passed to `_take` in this step."""

    def _wait(self) -> Any:
        assert self._handle is not None
        return self._handle.wait()

    def _assign(self, position: int, gradient: Tensor) -> None:
        parameter = self.parameters[position]
        # Skip a parameter that was frozen after its bucket was planned; only the other ranks needed it to be sent.
        if parameter.requires_grad:
            parameter.grad = gradient


class DenseBucket(Bucket):
    """A bucket with one flat tensor; gradients are views of it from the first step on.

    The flat tensor is allocated in the first step, and again after `exclude`. Its dtype is `dtype`, or that of the
    parameters if `dtype` is None. All parameters have the same dtype and device.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[int, Tensor],
        reduction: GradientReduction,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(name, parameters, reduction)
        self._dtype = dtype or next(iter(parameters.values())).dtype
        self._flat: Tensor | None = None
        self._views: dict[int, Tensor] = {}
        self._layout = 0
        self._factors = (1.0, 1.0)

    def exclude(self, position: int) -> None:
        """Remove a parameter, and move the gradients that were added before to a new flat tensor."""
        super().exclude(position)
        filled_views = {filled: self._views[filled] for filled in self._filled}
        self._flat = None
        if filled_views:
            self._allocate()
            for filled, view in filled_views.items():
                self._views[filled].copy_(view)

    def collect(self) -> None:
        """Wait for the sum, and make each gradient a view of it; copy the values if a gradient cannot be a view."""
        self._wait()
        for position, parameter in self.parameters.items():
            view, gradient = self._views[position], parameter.grad
            if gradient is None:
                self._assign(position, view if view.dtype == parameter.dtype else view.to(parameter.dtype))
            elif fits(gradient, view):
                self._assign(position, view)
            # The view has another dtype or strides, so the gradient keeps its own memory.
            elif parameter.requires_grad and gradient.data_ptr() != view.data_ptr():
                gradient.copy_(view)

    def _take(self, position: int) -> None:
        if self._flat is None:
            self._allocate()
        if not self._filled:
            # Compute the factors in each step: the number of ranks can change between the steps of an elastic job.
            self._factors = self.reduction.factors()
        parameter, view, factor = self.parameters[position], self._views[position], self._factors[0]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
            return
        if factor != 1.0:
            torch.mul(gradient.detach(), factor, out=view)
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.detach())
        if fits(gradient, view):
            # Assign the view now, not in `collect`. This frees the gradient's memory for the next gradient of the
            # backward pass; allocating new memory would take longer than the copy.
            parameter.grad = view

    def _send(self) -> Handle:
        assert self._flat is not None
        return submit_allreduce(
            [self._flat],
            [self._flat],
            name=self.name,
            op=self.reduction.op_on_wire,
            # `_take` has applied this factor. It is submitted so that ranks with different factors get an error.
            prescale_factor=self._factors[0],
            postscale_factor=self._factors[1],
            is_prescaled=True,
            # The engine does not fuse a grouped request with others, so equal runs give equal bits.
            is_grouped=True,
            process_set=self.reduction.process_set,
            layout=self._layout,
            round=self.reduction.round,
        )

    def _allocate(self) -> None:
        parameters = self.parameters.values()
        lengths = [parameter.numel() for parameter in parameters]
        device = next(iter(parameters)).device
        self._flat = torch.zeros(sum(lengths), dtype=self._dtype, device=device)
        parts = torch.split(self._flat, lengths)
        self._views = {i: view_like(p, part) for (i, p), part in zip(self.parameters.items(), parts, strict=True)}
        # `_layout` is a checksum of the memory order. The engine refuses requests with different checksums, because
        # unrelated elements would be added.
        layouts = [(tuple(view.shape), view.stride()) for view in self._views.values()]
        self._layout = zlib.crc32(repr(layouts).encode())


def layout_of(tensors: Iterable[Tensor]) -> int:
    """Return the checksum of the shapes of tensors whose numbers are sent in this order, see `Request.layout`."""
    return zlib.crc32(repr([tuple(tensor.shape) for tensor in tensors]).encode())


def pack(tensors: list[Tensor]) -> Tensor:
    """Return a flat copy of tensors of one dtype and device."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unpack(flat: Tensor, tensors: list[Tensor]) -> None:
    """Overwrite the tensors with the parts of `flat`, in order; the inverse of `pack`."""
    for part, tensor in zip(torch.split(flat, [tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.copy_(part.view(tensor.shape))


def view_like(parameter: Tensor, flat: Tensor) -> Tensor:
    """Return a view of `flat` in the shape of the parameter, and in its memory order if the parameter has no gaps.

    Copies between equal memory orders are several times faster than other copies.
    """
    if not parameter.numel():
        return flat.view(parameter.shape)
    strides = parameter.stride()
    # From the dimension with the largest stride to that with the smallest.
    order = sorted(range(parameter.ndim), key=lambda dimension: (-strides[dimension], dimension))
    # Without gaps, the stride of a dimension is the product of the lengths of all dimensions with smaller strides.
    expected_stride = 1
    for dimension in reversed(order):
        if parameter.shape[dimension] > 1 and strides[dimension] != expected_stride:
            return flat.view(parameter.shape)
        expected_stride *= parameter.shape[dimension]
    return flat.as_strided(parameter.shape, strides, flat.storage_offset())


def fits(gradient: Tensor, view: Tensor) -> bool:
    """Return whether the view can replace the gradient: both have the same dtype and strides."""
    return gradient.dtype == view.dtype and gradient.stride() == view.stride()
