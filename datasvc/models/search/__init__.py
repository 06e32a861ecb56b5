"""Finds model versions with SQL over their entries."""

from datasvc.models.search.query import find_versions, query_versions

__all__ = ["find_versions", "query_versions"]
