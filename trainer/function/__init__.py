"""Calls a function on every rank of a job: ``trainer.run``."""

from trainer.function.job import run

__all__ = ["run"]
