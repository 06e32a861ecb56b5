"""Training that goes on when ranks come and go, in the processes that are left: ``hvd.elastic``.

torch is imported when the first of these names is used: the launcher's side of this package starts without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.elastic.elastic_loader import ElasticLoader
    from trainer.elastic.elastic_sampler import ElasticSampler
    from trainer.elastic.handlers import StateHandler
    from trainer.elastic.host_update import HostsUpdatedInterrupt, HostUpdateResult
    from trainer.elastic.registry import get_handler_registry, set_handler_registry
    from trainer.elastic.run_loop import run
    from trainer.elastic.state import ObjectState, State
    from trainer.elastic.torch_state import TorchState

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

_MODULE_OF = {
    "ElasticLoader": "elastic_loader",
    "ElasticSampler": "elastic_sampler",
    "HostUpdateResult": "host_update",
    "HostsUpdatedInterrupt": "host_update",
    "ObjectState": "state",
    "State": "state",
    "StateHandler": "handlers",
    "TorchState": "torch_state",
    "get_handler_registry": "registry",
    "run": "run_loop",
    "set_handler_registry": "registry",
}


# Horovod's modules.
_PUBLIC_MODULES = ("sampler", "state")


def __getattr__(name: str) -> Any:
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"trainer.elastic.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'trainer.elastic' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"trainer.elastic.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PUBLIC_MODULES})
