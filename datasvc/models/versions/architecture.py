"""What a network consists of: how often each class of module and each operator of torch occurs in it.

Versions have these counts, so that a search finds networks by their layers, as the queries of ModelHub do (Miao et
al., ICDE 2017). Importing this module does not import torch.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from datasvc.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

_LOG: Final = logging.getLogger(__name__)
_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True)
class Architecture:
    """Counts that a search compares, as in `ops.conv2d > 50` and `modules.BatchNorm2d >= 2`.

    Attributes:
        modules: number of modules by the name of their class, the whole network included.
        ops: number of calls in a forward pass in evaluation mode, by the name of the ATen operator; empty: not known.

    Raises:
        ConfigError: a name is not a text, or a count is not an integer from 0 on.
    """

    modules: Mapping[str, int] = field(default_factory=dict)
    ops: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part, counts in self.to_dict().items():
            for name, count in counts.items():
                if not (isinstance(name, str) and name and type(count) is int and count >= 0):
                    raise ConfigError(f"{part} has {name!r}: {count!r}; expected a name and a count from 0 on")

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return the fields of an entry; without `ops` if these are not known."""
        counts = {"modules": dict(self.modules), "ops": dict(self.ops)}
        return {name: part for name, part in counts.items() if part}


def describe_architecture(model: nn.Module, *inputs: Any, timeout_s: float = _TIMEOUT_S) -> Architecture:
    """Count the modules of a network by class, and the operators of a forward pass, as `torch.export` names them.

    The forward pass runs on a copy of the network on torch's meta device, which has shapes and no data. So the
    network, its mode and torch's random generator stay as they are. If the pass fails, as where it depends on the
    values of tensors, or takes too long, the result has no operators, and the reason is logged.

    Args:
        model: network; no rank has only a part of it.
        inputs: arguments of a forward pass, tensors on any device and other values; none: do not count operators.
        timeout_s: time after which the forward pass ends at its next operator.
    """
    modules = Counter(type(module).__name__ for module in model.modules())
    ops: Mapping[str, int] = {}
    if inputs:
        try:
            ops = _count_operators(model, inputs, time.monotonic() + timeout_s)
        except Exception as error:  # noqa: BLE001 - the code of the network runs here and can raise anything
            _LOG.info("operators of %s were not counted: %s: %s", type(model).__name__, type(error).__name__, error)
    # Sorted, so that equal networks have equal entries.
    return Architecture(dict(sorted(modules.items())), dict(sorted(ops.items())))


def _count_operators(model: nn.Module, inputs: tuple[Any, ...], deadline_s: float) -> Counter[str]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()

    class CountOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if time.monotonic() > deadline_s:
                raise TimeoutError("the forward pass takes too long")
            counts[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        shape = torch.empty_like(tensor, device="meta", requires_grad=False)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return torch.nn.Parameter(shape, requires_grad=False) if is_parameter else shape

    # The copy takes these in place of the tensors, so no memory is needed for a second network.
    replaced = {id(tensor): on_meta(tensor) for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, replaced).eval()
    arguments = [on_meta(value) if isinstance(value, torch.Tensor) else value for value in inputs]
    # In inference mode torch does not decompose operators before they arrive here, so names are those of an export.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(), CountOperators():  # type: ignore[no-untyped-call]
        copied(*arguments)
    return counts
