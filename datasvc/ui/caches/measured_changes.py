"""Comparisons of model versions with the change of each tensor, measured in a process that ends afterwards."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from datasvc.errors import UnavailableError
from datasvc.models.registry.diff import ModelDifference
from datasvc.models.registry.diff_process import diff_in_process

_MAX_KEPT: Final = 8
_PATIENCE_S: Final = 4.0  # less than that of a page before it is shown as late


class MeasuredChanges:
    """The last comparisons. One is measured at a time, since each takes a processor and hundreds of megabytes.

    Args:
        url: URL of the repository.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._kept: OrderedDict[tuple[str, str], ModelDifference] = OrderedDict()
        self._measuring = threading.Lock()

    def diff(self, a: str, b: str) -> ModelDifference:
        """Compare two versions, which are resolved: their tensors never change.

        Raises:
            UnavailableError: another comparison is measured.
            DatasvcError: see `diff_in_process`.
        """
        if (kept := self._kept.get((a, b))) is not None:
            return kept
        if not self._measuring.acquire(timeout=_PATIENCE_S):
            raise UnavailableError(
                f"the change of each layer from {a} to {b} is not measured yet: this server measures another "
                "comparison, and one at a time; load the page again later"
            )
        try:
            if (a, b) not in self._kept:
                self._kept[a, b] = diff_in_process(self._url, a, b)
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
            return self._kept[a, b]
        finally:
            self._measuring.release()
