from hypothesis import given
from hypothesis import strategies as st

from trainer.buckets import plan_buckets

parameters = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["float", "half"])), max_size=30)


@given(parameters)
def test_every_parameter_is_in_one_bucket_of_its_kind_in_reverse_order_within_the_bound(parameters):
    sizes, kinds = [size for size, _ in parameters], [kind for _, kind in parameters]
    buckets = plan_buckets(sizes, kinds, first_bucket_bytes=20, bucket_bytes=50)
    assert sorted(p for bucket in buckets for p in bucket) == list(range(len(sizes)))
    seen = set()
    for bucket in buckets:
        (kind,) = {kinds[p] for p in bucket}
        assert bucket == sorted(bucket, reverse=True)
        assert len(bucket) == 1 or sum(sizes[p] for p in bucket) <= (50 if kind in seen else 20)
        seen.add(kind)


def test_the_first_bucket_is_small_so_that_communication_starts_early():
    assert plan_buckets([10] * 6, [0] * 6, first_bucket_bytes=20, bucket_bytes=30) == [[5, 4], [3, 2, 1], [0]]


def test_a_parameter_larger_than_a_bucket_has_its_own():
    assert plan_buckets([5, 99, 5], [0] * 3, first_bucket_bytes=20, bucket_bytes=30) == [[2], [1], [0]]
