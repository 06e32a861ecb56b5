from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.engine.execution.wire import plan_fusion
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, ReduceOp, Request

ELEMENT_BYTES = {"float32": 4, "int8": 1}


def request(*lengths, dtype="float32", is_grouped=False, reduce_op=ReduceOp.SUM, prescale_factor=1.0):
    return Request(
        name="x",
        kind=CollectiveKind.ALLREDUCE,
        dtypes=(dtype,) * len(lengths),
        shapes=tuple((length,) for length in lengths),
        reduce_op=reduce_op,
        prescale_factor=prescale_factor,
        is_grouped=is_grouped,
    )


def plan(requests, fusion_bytes=100):
    return plan_fusion(requests, fusion_bytes=fusion_bytes, element_bytes=ELEMENT_BYTES)


def operations(buffer):
    return [slot.operation for slot in buffer.slots]


single = st.builds(
    request,
    st.integers(0, 40),
    dtype=st.sampled_from(sorted(ELEMENT_BYTES)),
    reduce_op=st.sampled_from([ReduceOp.SUM, ReduceOp.MAX]),
    prescale_factor=st.sampled_from([1.0, 2.0]),
)
group = st.lists(st.integers(0, 40), min_size=1, max_size=4).map(lambda ns: request(*ns, is_grouped=True))
request_lists = st.lists(single | group, max_size=12)


@given(request_lists, st.integers(0, 200))
def test_every_tensor_is_in_one_buffer_at_adjacent_places_within_the_bound(requests, fusion_bytes):
    buffers = plan(requests, fusion_bytes)
    slots = [(slot.operation, slot.member) for buffer in buffers for slot in buffer.slots]
    assert sorted(slots) == [(i, k) for i, request in enumerate(requests) for k in range(len(request.shapes))]
    for buffer in buffers:
        stops = [slot.offset + slot.length for slot in buffer.slots]
        assert [slot.offset for slot in buffer.slots] == [0, *stops[:-1]]
        assert len(buffer.slots) == 1 or buffer.num_elements * ELEMENT_BYTES[buffer.dtype] <= fusion_bytes
        keys = {
            (requests[i].dtypes[0], requests[i].reduce_op, requests[i].prescale_factor) for i in operations(buffer)
        }
        assert len(keys) == 1


@given(request_lists, group, request_lists)
def test_a_group_is_packed_alike_whatever_else_is_ready(before, grouped, after):
    buffers = plan([*before, grouped, *after])
    mine = [b for b in buffers if len(before) in operations(b)]
    alone = plan([grouped])
    layout = [[(s.member, s.offset, s.length) for s in b.slots] for b in mine]
    assert layout == [[(s.member, s.offset, s.length) for s in b.slots] for b in alone]


def test_small_single_requests_of_one_kind_share_a_buffer():
    (buffer,) = plan([request(5), request(6), request(7)])
    assert operations(buffer) == [0, 1, 2]


def test_a_bound_of_zero_turns_fusion_off():
    assert len(plan([request(5), request(6)], fusion_bytes=0)) == 2
