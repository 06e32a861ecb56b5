"""How the rows of a tensor are dealt to ranks: pure."""

from __future__ import annotations


def split_rows(num_rows: int, num_ranks: int) -> list[int]:
    """Rows of each rank after a reducescatter: equal shares, the first `num_rows % num_ranks` get one more."""
    share, rest = divmod(num_rows, num_ranks)
    return [share + (place < rest) for place in range(num_ranks)]
