"""`hvd.elastic`: training that continues when ranks join or leave, without a restart of the other processes.

The package imports torch only when one of its names is first used, because the launcher imports the subpackage
`driver`, which must work without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasvc.trainer.elastic.handlers import StateHandler, TorchState, get_handler_registry, set_handler_registry
    from datasvc.trainer.elastic.run_loop import run
    from datasvc.trainer.elastic.sampler import ElasticLoader, ElasticSampler
    from datasvc.trainer.elastic.state import ObjectState, State
    from datasvc.trainer.rendezvous.messages import HostsUpdatedInterrupt, HostUpdateResult

__all__ = [
    "ElasticLoader",
    "ElasticSampler",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]

# The module of each public name, relative to `datasvc.trainer`.
_MODULE_OF = {
    "ElasticLoader": "elastic.sampler",
    "ElasticSampler": "elastic.sampler",
    "HostUpdateResult": "rendezvous.messages",
    "HostsUpdatedInterrupt": "rendezvous.messages",
    "ObjectState": "elastic.state",
    "State": "elastic.state",
    "StateHandler": "elastic.handlers",
    "TorchState": "elastic.handlers",
    "get_handler_registry": "elastic.handlers",
    "run": "elastic.run_loop",
    "set_handler_registry": "elastic.handlers",
}
# Modules of `horovod.torch.elastic` that programs use as attributes.
_PUBLIC_MODULES = ("sampler", "state")


def __getattr__(name: str) -> Any:
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"datasvc.trainer.elastic.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'datasvc.trainer.elastic' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"datasvc.trainer.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PUBLIC_MODULES})
