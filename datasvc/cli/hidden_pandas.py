"""Hides pandas from Arrow, which imports it where it is installed: some 50 MB and half a second for nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _NoPandas(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:  # noqa: ARG002
        """Raise ModuleNotFoundError for pandas; other finders find the other modules."""
        # Not `sys.modules["pandas"] = None`: Arrow is compiled, and would take None for the module.
        if name == "pandas":
            raise ModuleNotFoundError("pandas is hidden from this program", name=name)


def hide_pandas() -> None:
    """Let no later import of this process find pandas. Only for a program that never needs it, before its imports."""
    sys.meta_path.insert(0, _NoPandas())
