"""When an operation that some ranks have not submitted is worth a warning: pure, the clock is passed in."""

from collections.abc import Mapping


class StallWatch:
    """Remembers since when each operation waits, and when it was last reported."""

    def __init__(self, warning_s: float) -> None:
        self._warning_s = warning_s
        self._quiet_since: dict[str, float] = {}
        self._waiting_since: dict[str, float] = {}

    def check(self, now_s: float, missing: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Warnings due now; the same operation again only after another ``warning_s``.

        Args:
            now_s: seconds of any clock that does not go back.
            missing: for each pending operation, the ranks that have not submitted it.
        """
        for name in self._waiting_since.keys() - missing.keys():
            del self._waiting_since[name], self._quiet_since[name]
        warnings = []
        for name, ranks in missing.items():
            waiting_since = self._waiting_since.setdefault(name, now_s)
            if self._warning_s and now_s - self._quiet_since.setdefault(name, now_s) >= self._warning_s:
                self._quiet_since[name] = now_s
                warnings.append(_describe(name, ranks, now_s - waiting_since))
        return warnings


def _describe(name: str, ranks: tuple[int, ...], waited_s: float) -> str:
    who = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    return f"'{name}' has waited {waited_s:.0f} s for {who}, which did not submit it"
