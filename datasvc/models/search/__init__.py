"""Find model versions by a condition over their entries."""

from datasvc.models.search.find import find_versions

__all__ = ["find_versions"]
