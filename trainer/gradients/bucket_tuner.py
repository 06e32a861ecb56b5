"""Measures the first steps of a training, and chooses the size of buckets for the steps after them.

All ranks combine what they measured, and compute the choice from equal numbers. Invariant: all ranks have the same
choice in every step. So the choice is discarded when a new round of an elastic job begins, whose new ranks have no
choice. It is also discarded when all ranks have called `join`, because some have counted fewer steps.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.bucket_choice import AllReduceCost, choose_bucket_bytes, fit_cost
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import ProcessSet
from datasvc.trainer.job.submit import naming_round, submit_allreduce

logger = logging.getLogger(__name__)

# The first steps allocate memory and connect, so they do not count.
_WARM_UP_STEPS: Final = 2
_STEPS: Final = 5
# All-reduces of increasing sizes are measured, until one takes this long.
_LONG_S: Final = 0.05
_FIRST_BYTES: Final = 4 * 1024
_LAST_BYTES: Final = 16 * 1024 * 1024
_GROWTH: Final = 4
_REPEATS: Final = 4


class BucketTuner:
    """The measurement and the choice of one rank. The reducer of the gradients calls it, on every rank alike.

    Args:
        process_set: ranks whose gradients are combined.
        wire_dtype: dtype in which gradients are sent; None for that of the parameters.

    Attributes:
        bucket_bytes: chosen maximum size of buckets, in bytes of the parameters; None before the choice.
        cost: measured cost of an all-reduce, for bytes of the parameters; None before the choice.
    """

    def __init__(self, process_set: ProcessSet, wire_dtype: torch.dtype | None) -> None:
        self._process_set = process_set
        self._wire_dtype = wire_dtype
        self.restart()

    def restart(self) -> None:
        """Discard the choice and all measurements, for the current round of the job."""
        self.bucket_bytes: int | None = None
        self.cost: AllReduceCost | None = None
        self._round = naming_round()
        self._num_steps = 0
        self._stamps: dict[int, Any] = {}  # the time of each gradient in this step: seconds, or an event of CUDA
        self._ready_s: dict[int, list[float]] = defaultdict(list)  # by position, one time per measured step

    @property
    def is_outdated(self) -> bool:
        """Whether another round of the job, or of `join`, has begun since `restart`."""
        return self._round != naming_round()

    def record(self, position: int, parameter: Tensor) -> None:
        """Record that the gradient of a parameter is complete in this step."""
        if self.bucket_bytes is not None:
            return
        if parameter.is_cuda:
            # The host is ahead of the device, so only an event on the device has the time of the gradient.
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
            event.record()
            self._stamps[position] = event
        else:
            self._stamps[position] = time.perf_counter()

    def end_step(self, parameters: Mapping[int, Tensor], *, max_bytes: int) -> bool:
        """End a step, after all its gradients are combined. Return whether a choice was made.

        Every rank calls this after the same steps, with the same parameters.

        Args:
            parameters: parameters with dense gradients, by position.
            max_bytes: largest size of buckets to choose.
        """
        stamps, self._stamps = self._stamps, {}
        if self.bucket_bytes is not None or not parameters or self._process_set.size() == 1:
            return False
        self._num_steps += 1
        if self._num_steps <= _WARM_UP_STEPS:
            return False
        for position, ready_s in _seconds(stamps).items():
            self._ready_s[position].append(ready_s)
        if self._num_steps < _WARM_UP_STEPS + _STEPS:
            return False
        self._choose(parameters, max_bytes)
        return True

    def _choose(self, parameters: Mapping[int, Tensor], max_bytes: int) -> None:
        like = next(iter(parameters.values()))
        sizes_bytes = [parameter.numel() * parameter.element_size() for parameter in parameters.values()]
        medians = [statistics.median(self._ready_s.get(position, [0.0])) for position in parameters]
        # A bucket is sent when the last rank has its gradients.
        ready = torch.tensor(medians, dtype=torch.float64, device="cpu")
        self._allreduce(ready, ReduceOp.MAX)
        self.cost = self._measure_cost(like, total_bytes=sum(sizes_bytes))
        self.bucket_bytes = choose_bucket_bytes(
            self.cost,
            sizes_bytes,
            ready.tolist(),
            kinds=[(parameter.dtype, parameter.device) for parameter in parameters.values()],
            max_bytes=max_bytes,
        )
        self._ready_s.clear()
        if runtime.rank() == min(self._process_set.ranks or [0]):
            logger.info(
                "buckets of at most %.2f MB: an all-reduce takes %.3f ms + %.3f ms per MB, and the backward pass "
                "%.1f ms from the first gradient to the last",
                self.bucket_bytes / 1e6,
                self.cost.alpha_s * 1e3,
                self.cost.beta_s * 1e9,
                float(ready.max()) * 1e3,
            )

    def _measure_cost(self, like: Tensor, *, total_bytes: int) -> AllReduceCost:
        """Measure all-reduces through the engine, as buckets are sent; every rank gets the same result."""
        dtype = self._wire_dtype or like.dtype
        # Bytes on the wire for each byte of the parameters.
        share = dtype.itemsize / like.element_size()
        sizes_bytes: list[int] = []
        times_s: list[float] = []
        size_bytes = _FIRST_BYTES
        while len(sizes_bytes) < 2 or (times_s[-1] < _LONG_S and size_bytes <= min(total_bytes, _LAST_BYTES)):
            tensor = torch.zeros(int(size_bytes * share) // dtype.itemsize, dtype=dtype, device=like.device)
            samples_s = torch.tensor(
                [self._time(tensor) for _ in range(_REPEATS + 1)], dtype=torch.float64, device="cpu"
            )
            # The time of a rank includes its wait for later ranks. The last rank does not wait: it has the minimum.
            self._allreduce(samples_s, ReduceOp.MIN)
            sizes_bytes.append(size_bytes)
            times_s.append(float(samples_s[1:].median()))  # the first one is a warm-up
            size_bytes *= _GROWTH
        return fit_cost(sizes_bytes, times_s)

    def _time(self, tensor: Tensor) -> float:
        began = time.perf_counter()
        self._allreduce(tensor, ReduceOp.SUM)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        return time.perf_counter() - began

    def _allreduce(self, tensor: Tensor, op: ReduceOp) -> None:
        # Grouped like a bucket, so that the engine does not wait for other tensors to fuse it with.
        submit_allreduce(
            [tensor], [tensor], name="bucket choice", op=op, is_grouped=True, process_set=self._process_set
        ).wait()


def _seconds(stamps: Mapping[int, Any]) -> dict[int, float]:
    """Return the seconds from the first stamp to each stamp. The stamps are in the order in which they were taken."""
    if not stamps:
        return {}
    first, *_, last = [*stamps.values(), *stamps.values()]  # twice, because there may be only one
    if isinstance(first, float):
        return {position: stamp - first for position, stamp in stamps.items()}
    last.synchronize()  # the stream runs in order, so the earlier events are recorded too
    return {position: first.elapsed_time(stamp) * 1e-3 for position, stamp in stamps.items()}
