import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import CorruptDataError
from datasvc.repository.logs.log import decode_numbers, describe_numbers, encode_numbers

some_numbers = st.frozensets(st.integers(1, 60))


@given(some_numbers, some_numbers)
def test_the_text_of_numbers_gives_them_back_among_those_that_exist(numbers, exist):
    assert decode_numbers(encode_numbers(numbers), among=exist) == numbers & exist


def test_a_run_of_a_million_numbers_is_a_few_bytes_and_a_hostile_one_costs_nothing():
    assert encode_numbers(range(1, 1_000_001)) == "1-1000000"
    assert decode_numbers("1-999999999999999999", among=[3, 7]) == {3, 7}


@pytest.mark.parametrize("text", ["1-", "-3", "1;2", "a", "1,,2", None.__class__, "1-9999999999999999999"])
def test_what_names_no_versions_is_corrupt(text):
    with pytest.raises(CorruptDataError, match="is not a list of versions"):
        decode_numbers(text, among=[1])


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([], "none"),
        ([4], "4"),
        ([1, 2, 3, 7, 9, 10], "1 to 3, 7, 9 to 10"),
        (range(1, 100, 2), "1, 3, 5, 7, ..., 93, 95, 97, 99"),
    ],
)
def test_messages_show_runs_and_of_very_many_the_ends(numbers, said):
    assert describe_numbers(numbers) == said
