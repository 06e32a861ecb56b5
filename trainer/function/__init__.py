"""`datasvc.trainer.run`, which calls a function on every rank of a job."""

from __future__ import annotations

from datasvc.trainer.function.job import run

__all__ = ["run"]
