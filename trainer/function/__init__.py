"""Calls a function on every rank of a job: `datasvc.trainer.run`."""

from __future__ import annotations

from datasvc.trainer.function.job import run

__all__ = ["run"]
