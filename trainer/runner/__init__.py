"""Horovod's package of the launcher: the names of ``horovod.runner``, which are defined elsewhere. Loads no torch."""

from datasvc.trainer.function import run

__all__ = ["run"]
