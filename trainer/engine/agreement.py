"""The rule when ranks mean the same operation.

Pure, so that every rank comes to the same verdict in the same words.
"""

from collections.abc import Callable, Sequence

from trainer.engine.requests import Kind, Request

_Look = Callable[[Request], object]

_EVERY_KIND: tuple[tuple[str, _Look], ...] = (
    ("operation", lambda request: request.kind.value),
    ("data type", lambda request: _one_or_all(request.dtypes)),
    ("device", lambda request: request.device_type),
)
_ALLREDUCE: tuple[tuple[str, _Look], ...] = (
    ("shape", lambda request: _one_or_all(request.shapes)),
    ("reduction", lambda request: request.reduce_op.value if request.reduce_op else None),
    ("prescale factor", lambda request: request.prescale_factor),
    ("postscale factor", lambda request: request.postscale_factor),
    ("grouping", lambda request: "grouped" if request.is_grouped else "single"),
)
_BROADCAST: tuple[tuple[str, _Look], ...] = (
    ("root rank", lambda request: request.root_rank),
    ("shape", lambda request: _one_or_all(request.shapes)),
)
_ALLGATHER: tuple[tuple[str, _Look], ...] = (
    ("number of dimensions", lambda request: len(request.shapes[0])),
    ("shape after the first dimension", lambda request: request.shapes[0][1:]),
)
_BY_KIND = {
    Kind.ALLREDUCE: _ALLREDUCE,
    Kind.BROADCAST: _BROADCAST,
    Kind.ALLGATHER: _ALLGATHER,
    Kind.BARRIER: (),
}


def find_disagreement(requests: Sequence[Request]) -> str | None:
    """Why these requests, one per rank in rank order, cannot run as one operation; None if they can.

    Factors are compared as numbers, so NaN never agrees.
    """
    for what, look in _EVERY_KIND:
        if any(look(request) != look(requests[0]) for request in requests):
            return _describe(requests, what, look)
    for what, look in _BY_KIND[requests[0].kind]:
        if any(look(request) != look(requests[0]) for request in requests):
            return _describe(requests, what, look)
    if requests[0].kind is Kind.ALLGATHER and requests[0].shapes[0] == ():
        return f"'{requests[0].name}': a tensor without dimensions cannot be gathered; use tensor.reshape(1)"
    return None


def _describe(requests: Sequence[Request], what: str, look: _Look) -> str:
    ranks_by_value: dict[str, list[int]] = {}
    for rank, request in enumerate(requests):
        ranks_by_value.setdefault(str(look(request)), []).append(rank)
    said = "; ".join(f"{_name_ranks(ranks)}: {value}" for value, ranks in ranks_by_value.items())
    return f"ranks disagree on the {what} of '{requests[0].name}' ({said})"


def _name_ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _one_or_all(values: Sequence[object]) -> object:
    return values[0] if len(values) == 1 else tuple(values)
