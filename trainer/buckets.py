"""How gradients are grouped into buckets: pure, and equal on all ranks and in all runs of one model."""

from collections.abc import Hashable, Sequence

# As DistributedDataParallel has them: small enough that communication starts early in the backward pass,
# large enough that latency does not count; the first even smaller, because nothing hides it.
FIRST_BUCKET_BYTES = 1024 * 1024
BUCKET_BYTES = 25 * 1024 * 1024


def plan_buckets(
    sizes_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    *,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[list[int]]:
    """Groups parameters in reverse order, roughly that in which the backward pass reaches them.

    Args:
        sizes_bytes: of each parameter's gradient.
        kinds: of each parameter, what a bucket has only one of: dtype and device.
        first_bucket_bytes: bound of the first bucket of each kind.
        bucket_bytes: bound of the others. A larger parameter has a bucket of its own.

    Returns:
        Positions of parameters by bucket, each exactly once; buckets in the order of their first parameter.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    space_bytes: dict[Hashable, int] = {}
    for position in reversed(range(len(sizes_bytes))):
        kind, size_bytes = kinds[position], sizes_bytes[position]
        if kind not in open_buckets or size_bytes > space_bytes[kind]:
            space_bytes[kind] = bucket_bytes if kind in open_buckets else first_bucket_bytes
            open_buckets[kind] = []
            buckets.append(open_buckets[kind])
        open_buckets[kind].append(position)
        space_bytes[kind] -= size_bytes
    return buckets
