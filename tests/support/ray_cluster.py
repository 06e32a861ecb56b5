"""A Ray cluster of one node, for tests."""

from contextlib import contextmanager
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@contextmanager
def ray_cluster():
    """Start Ray, yield its module, and shut it down at the end. Workers import datasvc from this tree."""
    import ray  # slow to import

    variables = {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with pytest.MonkeyPatch.context() as patch:
        # By default Ray Train takes one report every 2 s, and a training waits with an earlier one.
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
        try:
            yield ray
        finally:
            ray.shutdown()
