"""A shard store that is timed is a shard store."""

import pytest

from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.timed_shards import TimedShards
from datasvc.shards import OriginShards
from tests.shards.versions.shard_store_laws import ShardStoreLaws


class TestTimedShards(ShardStoreLaws):
    @pytest.fixture
    def store(self, split):
        return TimedShards(OriginShards(split.repository), StepProfiler())
