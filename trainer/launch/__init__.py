"""Starts a program as the ranks of one data-parallel job, here and on other hosts, and ends them together.

`python -m datasvc.trainer.launch -np 2 python train.py`; installed as `datasvc-run`.
"""

from __future__ import annotations

from datasvc.trainer.launch.command_line import main, parse_arguments

__all__ = ["main", "parse_arguments"]
