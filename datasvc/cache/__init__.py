"""The cache of a node: one folder, whose objects never exceed a budget in bytes.

All processes of the node open the folder themselves, as a `Cache`; no daemon is needed.
"""

from datasvc.cache.cache import Cache
from datasvc.cache.cached_shards import CachedShards
from datasvc.cache.catalogue.configuration import parse_budget
from datasvc.cache.catalogue.quotas import Quota
from datasvc.cache.job import Acquired, CacheJob
from datasvc.cache.scrub import ScrubReport
from datasvc.cache.staging import StageReport
from datasvc.cache.status import CacheStatus, TenantUsage

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
