"""Checks that the requests of several ranks can form one operation.

`negotiation` uses this module. The functions depend only on their arguments, so every rank gets the same result and
the same error message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from datasvc.trainer.engine.negotiation.requests import CollectiveKind, Request

_Property = Callable[[Request], object]

# Properties that must be equal on all ranks, each with its title for error messages. `_EVERY_KIND` has those of every
# operation, `_BY_KIND` those of one kind.
_EVERY_KIND: tuple[tuple[str, _Property], ...] = (
    ("operation", lambda request: request.kind.value),
    ("data type", lambda request: _one_or_all(request.dtypes)),
    ("device", lambda request: request.device_type),
)
_GROUPING: tuple[str, _Property] = ("grouping", lambda request: "grouped" if request.is_grouped else "single")
_REDUCTION: tuple[tuple[str, _Property], ...] = (
    ("shape", lambda request: _one_or_all(request.shapes)),
    ("reduction", lambda request: request.reduce_op.value if request.reduce_op else None),
    ("prescale factor", lambda request: request.prescale_factor),
    ("postscale factor", lambda request: request.postscale_factor),
    _GROUPING,
    ("layout", lambda request: request.layout),
)
_ROWS: tuple[tuple[str, _Property], ...] = (
    ("number of dimensions", lambda request: _one_or_all([len(shape) for shape in request.shapes])),
    ("shape after the first dimension", lambda request: _one_or_all([shape[1:] for shape in request.shapes])),
    _GROUPING,
)
_BY_KIND: Mapping[CollectiveKind, tuple[tuple[str, _Property], ...]] = {
    CollectiveKind.ALLREDUCE: _REDUCTION,
    CollectiveKind.REDUCESCATTER: _REDUCTION,
    CollectiveKind.BROADCAST: (
        ("root rank", lambda request: request.root_rank),
        ("shape", lambda request: _one_or_all(request.shapes)),
    ),
    CollectiveKind.ALLGATHER: _ROWS,
    CollectiveKind.ALLTOALL: _ROWS,
    CollectiveKind.BARRIER: (),
    CollectiveKind.ADD_PROCESS_SET: (("ranks", lambda request: request.ranks),),
    CollectiveKind.REMOVE_PROCESS_SET: (("ranks", lambda request: request.ranks),),
}


def find_disagreement(requests: Mapping[int, Request]) -> str | None:
    """Return the reason why requests cannot run as one operation; None if they can.

    Factors are compared as numbers, so a factor of NaN always disagrees, even with itself.

    Args:
        requests: request of each rank, by global rank, in rank order; not empty.
    """
    first = next(iter(requests.values()))
    if len(requests) > 1 and all(request is first for request in requests.values()):
        # One object for several ranks comes from the request cache, so the ranks have agreed on it before.
        return None
    # `_EVERY_KIND` compares the kinds first, because the other properties depend on the kind.
    for title, get_value in (*_EVERY_KIND, *_BY_KIND[first.kind]):
        if any(get_value(request) != get_value(first) for request in requests.values()):
            return _describe(requests, title, get_value)
    if first.kind is CollectiveKind.ALLGATHER and () in first.shapes:
        return f"{first.key.describe()}: a tensor without dimensions cannot be gathered; use tensor.reshape(1)"
    return None


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks as text, such as "rank 3" or "ranks 0, 1"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _describe(requests: Mapping[int, Request], title: str, get_value: _Property) -> str:
    """Return the error message for a property on which ranks disagree, with the ranks of each value."""
    ranks_by_value: dict[str, list[int]] = {}
    for rank, request in requests.items():
        ranks_by_value.setdefault(str(get_value(request)), []).append(rank)
    values = "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in ranks_by_value.items())
    key = next(iter(requests.values())).key
    return f"ranks disagree on the {title} of {key.describe()} ({values})"


def _one_or_all(values: Sequence[object]) -> object:
    """Return the value itself if there is only one, for a shorter error message; otherwise a tuple of the values."""
    return values[0] if len(values) == 1 else tuple(values)
