"""Calls, results and exceptions as bytes."""

import pytest

from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.function.pickling import (
    RankTracebackError,
    call_pickled,
    pickle_call,
    pickle_error,
    pickle_result,
    unpickle_error,
    unpickle_result,
)


def raised(function):
    try:
        function()
    except BaseException as error:
        return unpickle_error(pickle_error(3, error))
    raise AssertionError


def test_a_call_of_a_closure_is_made_from_its_bytes():
    factor = 7
    assert call_pickled(pickle_call(lambda x, y: factor * (x - y), (5,), {"y": 2})) == 21


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(TypeError, match=r"the function or its arguments cannot be sent to the ranks: .*generator"):
        pickle_call(len, ((x for x in []),), {})
    with pytest.raises(TypeError, match="the result of rank 2, a generator, cannot be pickled"):
        pickle_result(2, (x for x in []))


def test_a_result_comes_out_as_it_went_in():
    assert unpickle_result(pickle_result(0, {"a": [1, (2, None)]})) == {"a": [1, (2, None)]}


class NeedsTwoArgumentsError(Exception):
    def __init__(self, what, code):
        super().__init__(what)
        self.code = code


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad", 3),
        KeyError("x"),
        FileNotFoundError(2, "no", "file"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "y"),
    ],
)
def test_an_exception_keeps_its_type_and_arguments_and_has_the_ranks_traceback(error):
    def fail():
        raise error

    copy = raised(fail)
    assert (type(copy), copy.args, str(copy)) == (type(error), error.args, str(error))
    assert isinstance(copy.__cause__, RankTracebackError)
    assert "on rank 3" in str(copy.__cause__)
    assert "in fail" in str(copy.__cause__)


def test_an_exception_that_pickle_cannot_make_anew_keeps_its_type_and_attributes():
    def fail():
        raise NeedsTwoArgumentsError("what", 5)

    copy = raised(fail)
    assert (type(copy), str(copy), copy.code) == (NeedsTwoArgumentsError, "what", 5)


def test_an_exception_that_cannot_travel_is_told_in_words():
    class OddError(Exception):
        def __reduce__(self):
            raise RuntimeError

        def __new__(cls, *args):
            return super().__new__(cls, *args)

    def fail():
        error = OddError("in words")
        error.stream = (x for x in [])
        raise error

    copy = raised(fail)
    assert type(copy) is HorovodInternalError
    assert "rank 3 failed" in str(copy)
    assert "in words" in str(copy)


def test_a_rank_that_called_exit_does_not_end_the_caller():
    copy = raised(lambda: exec("import sys; sys.exit(4)"))
    assert isinstance(copy, HorovodInternalError)
    assert "rank 3 called sys.exit(4)" in str(copy)
