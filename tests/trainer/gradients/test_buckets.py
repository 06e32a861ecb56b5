from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.gradients.bucket_choice import cut_evenly, plan_buckets, plan_groups

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


def test_without_room_every_parameter_has_its_own():
    assert plan_buckets([5, 1, 5], [0] * 3, bucket_bytes=0) == [[2], [1], [0]]


@given(parameters, st.data())
def test_groups_are_buckets_of_one_kind_and_the_rest_is_as_without_groups(parameters, data):
    sizes, kinds = [size for size, _ in parameters], [kind for _, kind in parameters]
    order = data.draw(st.permutations(range(len(sizes))))
    cut = data.draw(st.integers(0, len(sizes)))
    groups = cut_evenly(order[:cut], 3)
    buckets = plan_groups(sizes, kinds, groups, bucket_bytes=50)
    assert sorted(p for bucket in buckets for p in bucket) == list(range(len(sizes)))
    expected = [{p for p in group if kinds[p] == kind} for group in groups for kind in ("float", "half")]
    made = [set(bucket) for bucket in buckets]
    assert all(each in made for each in expected if each)
    rest = sorted(order[cut:])
    alone = plan_buckets([sizes[p] for p in rest], [kinds[p] for p in rest], bucket_bytes=50)
    assert buckets[len(buckets) - len(alone) :] == [[rest[i] for i in members] for members in alone]


@given(st.lists(st.integers()), st.integers(1, 9))
def test_even_runs_are_in_order_and_differ_by_one_at_most(values, num_groups):
    runs = cut_evenly(values, num_groups)
    assert [value for run in runs for value in run] == values
    assert len(runs) == min(num_groups, len(values))
    assert max(map(len, runs), default=0) - min(map(len, runs), default=0) <= 1
