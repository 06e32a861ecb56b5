"""Measures backends on the first batch and goes on with the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from loaders.augment import Windows
from loaders.decode.backend import Backend, DecodedImages, Edit, ImageBackend, Read
from loaders.decode.choose import choose_fastest, measure_rate
from loaders.step_times import Stage
from loaders.stopwatch import Stopwatch

if TYPE_CHECKING:
    from datasvc.shards.mapped_file import Bytes

_MEASURED_S: Final = 0.5  # for each


class FastestBackend:
    """An `ImageBackend` that becomes one of several.

    Args:
        makers: of those to choose from.
        prefetch: batches under way while they are measured.
        on_choice: is told which was chosen, and all rates in images per second.
        duration_s: for how long each is measured.
        stopwatch: of the loader; None: nobody's.
    """

    def __init__(
        self,
        makers: Mapping[Backend, Callable[[], ImageBackend]],
        *,
        prefetch: int,
        on_choice: Callable[[Backend, Mapping[Backend, float]], None],
        duration_s: float = _MEASURED_S,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._makers = makers
        self._prefetch = prefetch
        self._on_choice = on_choice
        self._duration_s = duration_s
        self._stopwatch = stopwatch or Stopwatch()
        self._chosen: ImageBackend | None = None

    def feed(
        self, images: Sequence[Bytes], windows: Windows, edit: Edit | None = None, read: Read | None = None
    ) -> None:
        """See `ImageBackend`; the first batch decides."""
        if self._chosen is None:
            with self._stopwatch.stage(Stage.START):
                self._chosen = self._choose(images, windows)
        self._chosen.feed(images, windows, edit, read)

    def take(self) -> DecodedImages:
        """See `ImageBackend`."""
        assert self._chosen is not None
        return self._chosen.take()

    def close(self) -> None:
        """See `ImageBackend`."""
        if self._chosen is not None:
            self._chosen.close()

    def _choose(self, images: Sequence[Bytes], windows: Windows) -> ImageBackend:
        first = next(iter(self._makers))
        if not images:  # nothing to measure on, and nothing to decode
            return self._makers[first]()
        rates = {
            backend: measure_rate(make(), images, windows, prefetch=self._prefetch, duration_s=self._duration_s)
            for backend, make in self._makers.items()
        }
        chosen = choose_fastest(rates)
        self._on_choice(chosen, rates)
        return self._makers[chosen]()
