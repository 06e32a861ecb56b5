"""Which shards a range of positions may need, by the windows of an access order."""

import numpy as np


def live_shards(order, start, stop):
    """Return the shards that positions [start, stop) may need, ascending."""
    windows = order.windows
    return np.unique(windows.shards[(windows.first < stop) & (windows.stop > start)])
