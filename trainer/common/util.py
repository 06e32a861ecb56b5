"""The functions of `horovod.common.util` that programs use, for PyTorch only."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.job import capabilities
from datasvc.trainer.job.submit import is_power_of_two
from datasvc.trainer.ops.autograd import choose_op

T = TypeVar("T")

EXTENSIONS = ("torch",)


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:  # noqa: ARG001 - Horovod's
    """Check that the trainer supports a framework, such as "horovod.torch".

    Raises:
        ImportError: `ext_name` is not an extension for PyTorch.
    """
    if ext_name.rpartition(".")[2] not in EXTENSIONS:
        raise ImportError(f"{ext_name} is not available: the trainer supports PyTorch only, as horovod.torch")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's signature
    """Return whether the trainer supports a framework; True for "torch" only."""
    return ext_base_name in EXTENSIONS


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's signature
    """Return whether the framework is "torch" and CUDA has a GPU."""
    return ext_base_name in EXTENSIONS and torch.cuda.is_available()


# Horovod defines these functions in two modules. Only those of `horovod.common.util` take `verbose`; it is ignored.
def _accept_verbose(capability: Callable[[], T]) -> Callable[..., T]:
    def built(verbose: bool = False) -> T:  # noqa: ARG001 - Horovod's signature
        return capability()

    built.__doc__ = capability.__doc__
    return built


mpi_built = _accept_verbose(capabilities.mpi_built)
gloo_built = _accept_verbose(capabilities.gloo_built)
nccl_built = _accept_verbose(capabilities.nccl_built)
ddl_built = _accept_verbose(capabilities.ddl_built)
ccl_built = _accept_verbose(capabilities.ccl_built)


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables inside the block and restore them after it; ignore variables with the value None."""
    new_values = {name: value for name, value in kwargs.items() if value is not None}
    old_values = {name: os.environ.get(name) for name in new_values}
    os.environ.update(new_values)
    try:
        yield
    finally:
        for name, value in old_values.items():
            if value is None:  # the variable was not set
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(
    reduce_ops: object,  # noqa: ARG001 - Horovod passes the operations of the framework
) -> Callable[[ReduceOp | None, bool | None], ReduceOp]:
    """Return a function that chooses the reduction from the arguments `op` and `average`; see `choose_op`."""
    return lambda op, average: choose_op(average, op)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether the number of ranks is a power of two, as Adasum requires."""
    return num_rank > 0 and is_power_of_two(num_rank)


def split_list(l: Sequence[T], n: int) -> list[list[T]]:  # noqa: E741 - Horovod's name
    """Split a list into `n` consecutive parts; the first `len(l) % n` parts have one element more than the others."""
    length, num_longer = divmod(len(l), n)
    stops = [(i + 1) * length + min(i + 1, num_longer) for i in range(n)]
    return [list(l[start:stop]) for start, stop in zip([0, *stops], stops, strict=False)]


def is_iterable(x: object) -> bool:
    """Return whether `iter(x)` works."""
    try:
        iter(x)  # type: ignore[call-overload]  # this is what the function tests
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is at least `target`. Only major, minor and patch are compared; `ver` may omit patch.

    Raises:
        ValueError: `ver` is not of the form major.minor, or `target` not of the form major.minor.patch.
    """
    # A match has the groups major, minor and patch; patch may be None.
    version, minimum = [
        re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text) if isinstance(text, str) else None for text in (ver, target)
    ]
    if version is None or minimum is None or minimum[3] is None:
        raise ValueError(f"versions must be strings such as '1.10.0', not {ver!r} and {target!r}")
    return tuple(int(part or 0) for part in version.groups()) >= tuple(int(part) for part in minimum.groups())
