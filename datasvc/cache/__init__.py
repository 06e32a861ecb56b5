"""A node's cache: one folder, shared by all processes and jobs on it, with a hard budget and no daemon."""

from datasvc.cache.budget import parse_budget
from datasvc.cache.cache import Acquired, Cache, CachedShards
from datasvc.cache.catalogue.quotas import Quota
from datasvc.cache.scrub import ScrubReport
from datasvc.cache.staging import StageReport
from datasvc.cache.status import CacheStatus, TenantUsage

__all__ = [
    "Acquired",
    "Cache",
    "CacheStatus",
    "CachedShards",
    "Quota",
    "ScrubReport",
    "StageReport",
    "TenantUsage",
    "parse_budget",
]
