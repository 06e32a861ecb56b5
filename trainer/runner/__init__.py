"""The public name of `horovod.runner`: `run` starts a job from Python. This package does not import torch."""

from __future__ import annotations

from datasvc.trainer.function import run

__all__ = ["run"]
