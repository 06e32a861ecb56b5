"""A node's cache: one folder, shared by all processes and jobs on it, with a hard budget and no daemon."""

from datasvc.cache.budget import parse_budget
from datasvc.cache.cache import Cache, CachedShards, CacheStatus, StageReport

__all__ = ["Cache", "CacheStatus", "CachedShards", "StageReport", "parse_budget"]
