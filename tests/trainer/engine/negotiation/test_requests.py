import math

from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.engine.negotiation.requests import (
    CollectiveKind,
    CycleMessage,
    ReduceOp,
    Request,
    RequestCache,
    Tuning,
    decode_message,
    encode_message,
)

shapes = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
factors = st.floats(allow_nan=False)
requests = st.builds(
    Request,
    name=st.text(max_size=20),
    kind=st.sampled_from(CollectiveKind),
    dtypes=st.lists(st.sampled_from(["float32", "int8"]), max_size=3).map(tuple),
    shapes=st.lists(shapes, max_size=3).map(tuple),
    device_type=st.sampled_from(["cpu", "cuda"]),
    reduce_op=st.none() | st.sampled_from(ReduceOp),
    root_rank=st.none() | st.integers(0, 1000),
    prescale_factor=factors,
    postscale_factor=factors,
    is_grouped=st.booleans(),
    process_set=st.integers(0, 9),
    splits=st.none() | st.lists(st.integers(0, 99), max_size=3).map(tuple),
    ranks=st.none() | st.lists(st.integers(0, 99), max_size=3).map(tuple),
)
messages = st.builds(
    CycleMessage,
    entries=st.lists(requests | st.integers(0, 5000), max_size=4).map(tuple),
    is_leaving=st.booleans(),
    failure=st.text(max_size=9),
    tuning=st.none() | st.builds(Tuning, st.integers(0, 2**40), st.floats(0, 10)),
)


@given(messages)
def test_a_decoded_message_is_what_was_encoded(message):
    assert decode_message(encode_message(message)) == message


def test_a_rank_with_nothing_to_say_sends_no_bytes():
    assert encode_message(CycleMessage()) == b""


def test_infinite_factors_survive_the_encoding():
    message = CycleMessage((Request(name="x", kind=CollectiveKind.ALLREDUCE, prescale_factor=math.inf),))
    assert decode_message(encode_message(message)) == message


def named(name, shape=(1,)):
    return Request(name=name, kind=CollectiveKind.ALLREDUCE, dtypes=("float32",), shapes=(shape,))


def test_a_remembered_request_has_a_number_until_the_name_means_something_else():
    cache = RequestCache(capacity=2)
    cache.remember(named("a"))
    assert cache.resolve(cache.find(named("a"))) == named("a")
    assert cache.find(named("a", (2,))) is None
    cache.remember(named("a", (2,)))
    assert cache.find(named("a")) is None
    assert cache.find(named("a", (2,))) is not None


def test_the_least_recently_agreed_request_makes_room():
    cache = RequestCache(capacity=2)
    for name in ("a", "b", "a", "c"):
        cache.remember(named(name))
    assert cache.find(named("b")) is None
    assert cache.find(named("a")) is not None
    assert cache.find(named("c")) is not None


def test_a_cache_without_capacity_remembers_nothing():
    cache = RequestCache(capacity=0)
    cache.remember(named("a"))
    assert cache.find(named("a")) is None
