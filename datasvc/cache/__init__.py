"""The cache of a node: one folder, whose objects never exceed a budget in bytes.

All processes of the node open the folder themselves, as a `Cache`; no daemon is needed.
"""

from datasvc.cache.cache import Cache, StageReport
from datasvc.cache.catalogue.configuration import parse_budget
from datasvc.cache.catalogue.quotas import Quota
from datasvc.cache.job import Acquired, CachedShards, CacheJob
from datasvc.cache.status import CacheStatus, ScrubReport, TenantUsage

__all__ = [
    "Acquired",
    "Cache",
    "CacheJob",
    "CacheStatus",
    "CachedShards",
    "Quota",
    "ScrubReport",
    "StageReport",
    "TenantUsage",
    "parse_budget",
]
