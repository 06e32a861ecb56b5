"""The modules of `horovod.common` that programs import, under the same names."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("basics", "elastic", "exceptions", "process_sets", "util")


def __getattr__(name: str) -> Any:
    # On demand, because these modules import torch, and other modules of the trainer import `exceptions`.
    if name in _MODULES:
        return importlib.import_module(f"datasvc.trainer.common.{name}")
    raise AttributeError(f"module 'datasvc.trainer.common' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
