"""Checks of an installation, its machine, folders, stores and nodes: what works, what does not, and what to do."""

from __future__ import annotations

from datasvc.doctor.examination import examine
from datasvc.doctor.finding import Finding

__all__ = ["Finding", "examine"]
