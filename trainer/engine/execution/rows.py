"""Distribution of the rows of a tensor over ranks. Pure."""

from __future__ import annotations


def split_rows(num_rows: int, num_ranks: int) -> list[int]:
    """Return the number of rows of each rank after a reducescatter; the first `num_rows % num_ranks` get one more."""
    rows_per_rank, num_longer = divmod(num_rows, num_ranks)
    return [rows_per_rank + (index < num_longer) for index in range(num_ranks)]
