"""The functions of ``horovod.common.util`` that programs use. They are about PyTorch only."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.job import capabilities
from datasvc.trainer.ops.reductions import choose_op

T = TypeVar("T")

EXTENSIONS = ("torch",)


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:  # noqa: ARG001 - Horovod's
    """Raises ImportError: ``ext_name`` is no framework that there is here, such as "horovod.torch"."""
    if ext_name.rpartition(".")[2] not in EXTENSIONS:
        raise ImportError(f"{ext_name} is not here: the trainer is for PyTorch only, as horovod.torch")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's signature
    """Whether there is something for this framework: "torch" only."""
    return ext_base_name in EXTENSIONS


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's signature
    """Whether the framework finds a GPU."""
    return ext_base_name in EXTENSIONS and torch.cuda.is_available()


def _also_verbose(answer: Callable[[], T]) -> Callable[..., T]:
    def built(verbose: bool = False) -> T:  # noqa: ARG001 - Horovod's signature
        return answer()

    built.__doc__ = answer.__doc__
    return built


mpi_built = _also_verbose(capabilities.mpi_built)
gloo_built = _also_verbose(capabilities.gloo_built)
nccl_built = _also_verbose(capabilities.nccl_built)
ddl_built = _also_verbose(capabilities.ddl_built)
ccl_built = _also_verbose(capabilities.ccl_built)


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Sets variables of the environment inside the block; those given as None stay as they are."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(
    reduce_ops: object,  # noqa: ARG001 - Horovod has others for each framework
) -> Callable[[ReduceOp | None, bool | None], ReduceOp]:
    """A function of (op, average) that returns the op that they mean; see `choose_op`."""
    return lambda op, average: choose_op(average, op)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether Adasum can be had among so many ranks."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[T], n: int) -> list[list[T]]:  # noqa: E741 - Horovod's name
    """Cuts a list into ``n`` runs, of which the first ones have one entry more where it does not come out even."""
    length, rest = divmod(len(l), n)
    stops = [(i + 1) * length + min(i + 1, rest) for i in range(n)]
    return [list(l[start:stop]) for start, stop in zip([0, *stops], stops, strict=False)]


def is_iterable(x: object) -> bool:
    """Whether ``iter`` takes it."""
    try:
        iter(x)  # type: ignore[call-overload]  # that is the question
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version is at least ``target``, of the form major.minor.patch; what follows these does not count.

    Raises:
        ValueError: one of them is no version.
    """
    numbers = [
        re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text) if isinstance(text, str) else None for text in (ver, target)
    ]
    mine, least = numbers
    if mine is None or least is None or least[3] is None:
        raise ValueError(f"versions must be texts such as 1.10.0, not {ver!r} and {target!r}")
    return tuple(int(part or 0) for part in mine.groups()) >= tuple(int(part) for part in least.groups())
