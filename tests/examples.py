"""How many examples a property is tried on: few in `make test`, all of them in `make test-all`."""

import os
from typing import Any

from hypothesis import settings

# Examples are derived from the test alone (see `tests/conftest.py`), so a second run of equal code learns nothing new
# from them. The fast set tries few, and the whole set all.
FAST = 15


def examples(num_examples: int, *, fast: int = FAST, **more: Any) -> settings:
    """Return settings for a property that is tried on `num_examples`, in the fast set on `fast` at most."""
    is_fast = os.environ.get("HYPOTHESIS_PROFILE", "fast") == "fast"
    return settings(max_examples=min(fast, num_examples) if is_fast else num_examples, **more)
