"""The public names of `horovod.runner`, the package of the launcher. Does not import torch."""

from __future__ import annotations

from datasvc.trainer.function import run

__all__ = ["run"]
