"""Batch normalization over the batches of all ranks, on CPUs and GPUs.

The statistics are computed from one sum over the ranks. Ranks may have batches of different sizes or empty batches,
and ranks that have called `join` (they have no more batches) add zeros. The variance is the mean square minus the
squared mean; the sums are in float64 to keep it accurate.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.ops import Sum, allreduce_
from datasvc.trainer.optim.parameter_names import next_number


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - the base class of torch's modules
    """Batch normalization for inputs of any number of dimensions; training uses the statistics of all ranks.

    Every rank must create its modules in the same order, and call them in the same order. The module does not
    communicate in evaluation, or on ranks outside the process set. The gradients of weight and bias are those of the
    local batch only; `DistributedOptimizer` combines them.

    Args:
        num_features: number of channels, the second dimension of the input.
        eps: number added to the variance.
        momentum: momentum of the running statistics; None for their cumulative average.
        affine: whether the module has weight and bias.
        track_running_stats: whether the module has running statistics, which evaluation uses.
        process_set: ranks whose batches are normalized together.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set
        # The name of the allreduce must be equal on all ranks. It contains no count of calls, because ranks with
        # epochs of different lengths have different counts.
        self._name = f"sync_batch_norm.{next_number('sync_batch_norm')}"

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalize `floating[batch, num_features, ...]`.

        Raises:
            ValueError: the input has fewer than two dimensions; all ranks together have at most one value per
                channel; the trainer is not initialized.
            HorovodInternalError: ranks disagree on the number of channels, or a rank is lost.
        """
        if input.dim() < 2:
            raise ValueError(f"expected an input with at least two dimensions, not {input.dim()}")
        if not self.training or not self.process_set.included() or self.process_set.size() == 1:
            return self._normalize_locally(input)
        arguments = (input, self.weight, self.bias, self.eps, self._name, self.process_set)
        output, mean, variance, count = _Normalize.apply(*arguments)  # type: ignore[no-untyped-call]  # untyped in torch
        self._track(mean, variance, count)
        return cast("Tensor", output)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_set: ProcessSet = global_process_set) -> nn.Module:
        """Replace every `torch.nn.BatchNorm*d` and `torch.nn.SyncBatchNorm` in a module, or the module itself.

        The new modules share parameters and buffers with the old modules, so that an existing optimizer stays valid.

        Returns:
            The module, in which submodules are replaced in place; a new module if `module` itself is replaced.
        """
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - the base class of all of them
            return module if isinstance(module, cls) else cls._from_local(module, process_set)
        for name, child in module.named_children():
            converted = cls.convert_sync_batchnorm(child, process_set)
            if converted is not child:
                module.add_module(name, converted)
        return module

    @classmethod
    def _from_local(cls, module: nn.modules.batchnorm._BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        # Create no parameters and buffers here, because those of the old module are shared below.
        converted = cls(
            module.num_features,
            module.eps,
            module.momentum,
            affine=False,
            track_running_stats=False,
            process_set=process_set,
        )
        converted.affine, converted.track_running_stats = module.affine, module.track_running_stats
        # Share the dicts themselves, so that the new module has the same entries, including those that are None.
        converted._parameters, converted._buffers = module._parameters, module._buffers  # noqa: SLF001
        converted.training = module.training
        return converted

    def _normalize_locally(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalize like torch's modules, without the other ranks."""
        uses_batch_statistics = self.training or self.running_mean is None
        momentum = self._next_momentum() if self.training and self.track_running_stats else 0.0
        # In evaluation, `batch_norm` normalizes with the running statistics. In training, it only updates them.
        pass_running_statistics = not self.training or self.track_running_stats
        return functional.batch_norm(
            input,
            self.running_mean if pass_running_statistics else None,
            self.running_var if pass_running_statistics else None,
            self.weight,
            self.bias,
            uses_batch_statistics,
            momentum,
            self.eps,
        )

    def _next_momentum(self) -> float:
        """Count a batch, and return the weight of its statistics in the running statistics."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return self.momentum
        assert self.num_batches_tracked is not None
        return 1.0 / float(self.num_batches_tracked)

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics with those of a batch of `count` values per channel."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        momentum = self._next_momentum()
        with torch.no_grad():
            # As torch does: normalize by the biased variance, but track the unbiased one.
            unbiased = variance * (count / (count - 1))
            self.running_mean.mul_(1 - momentum).add_(mean.to(self.running_mean.dtype), alpha=momentum)
            self.running_var.mul_(1 - momentum).add_(unbiased.to(self.running_var.dtype), alpha=momentum)


class _Normalize(torch.autograd.Function):
    """Normalization by the statistics of all ranks.

    Returns the output, the mean and biased variance of each channel, and the number of values per channel over all
    ranks; the last three are float64.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # noqa: A002 - torch's name
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        name: str,
        process_set: ProcessSet,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sums = allreduce_(_sums_of(input), op=Sum, name=name, process_set=process_set)
        count, value_sums, square_sums = sums[-1], *sums[:-1].chunk(2)  # the layout of `_sums_of`
        if float(count) <= 1:
            raise ValueError(
                f"training needs more than 1 value per channel over all ranks, but the input is {tuple(input.shape)}"
            )
        mean = value_sums / count
        # Rounding can make a variance of zero slightly negative.
        variance = (square_sums / count - mean * mean).clamp_(min=0)
        ctx.save_for_backward(input, weight, mean, (variance + eps).rsqrt(), count)
        ctx.name, ctx.process_set = name, process_set
        dtype = _working_dtype(input)
        moments = mean.to(dtype), variance.to(dtype)
        # An empty batch has nothing to normalize; this rank only takes part in the sum.
        output = (
            functional.batch_norm(input, *moments, weight, bias, eps=eps)
            if input.numel()
            else torch.empty_like(input)
        )
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse_std, count = ctx.saved_tensors  # noqa: A001 - torch's name
        # A view with `shape` broadcasts one value per channel over the input. `axes` lacks only the channel axis.
        dtype, shape = _working_dtype(input), (1, -1, *[1] * (input.dim() - 2))
        axes = [axis for axis in range(input.dim()) if axis != 1]
        output_gradient, centred = gradient.to(dtype), input.to(dtype) - mean.to(dtype).view(shape)
        bias_gradient, products = output_gradient.sum(axes), (output_gradient * centred).sum(axes)
        sums = torch.cat([bias_gradient, products]).double()
        sums = allreduce_(sums, op=Sum, name=f"{ctx.name}.gradient", process_set=ctx.process_set)
        # Mean and variance depend on all inputs. So the input gradient, with means over all ranks, is
        # weight / std * (gradient - mean(gradient) - centred * mean(gradient * centred) / std^2).
        mean_gradient, mean_product = (sums / count).chunk(2)
        scale = inverse_std if weight is None else inverse_std * weight.double()
        centred_scale = scale * inverse_std * inverse_std * mean_product
        scale, centred_scale, mean_gradient = (
            values.to(dtype).view(shape) for values in (scale, centred_scale, mean_gradient)
        )
        input_gradient = ((output_gradient - mean_gradient) * scale).sub_(centred.mul_(centred_scale)).to(input.dtype)
        if weight is None:
            return (input_gradient, *[None] * 5)
        weight_gradient = (products * inverse_std.to(dtype)).to(weight.dtype)
        return (input_gradient, weight_gradient, bias_gradient.to(weight.dtype), None, None, None)


def _sums_of(input: Tensor) -> Tensor:  # noqa: A002 - torch's name
    """Return float64[2C + 1]: the sum of each channel, the sum of squares of each channel, the number of values."""
    axes = [axis for axis in range(input.dim()) if axis != 1]
    count = input.numel() // input.shape[1] if input.shape[1] else 0
    num_values = torch.full((1,), float(count), dtype=torch.float64, device=input.device)
    if not count:
        return torch.cat([num_values.new_zeros(2 * input.shape[1]), num_values])
    moments = torch.var_mean(input.to(_working_dtype(input)), axes, correction=0)
    variance, mean = (moment.double() for moment in moments)
    # The mean square of values is their variance plus their squared mean.
    return torch.cat([mean * count, (variance + mean * mean) * count, num_values])


def _working_dtype(input: Tensor) -> torch.dtype:  # noqa: A002 - torch's name
    """Return the dtype to compute in: float32, or that of the input if it is wider."""
    return torch.promote_types(input.dtype, torch.float32)
