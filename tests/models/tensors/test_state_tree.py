import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.tensors.state_tree import flatten, unflatten

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)  # infinities included
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(trees)
def test_a_state_tree_comes_back_with_its_types(state):
    import json

    skeleton, tensors = flatten(state)
    back = unflatten(json.loads(json.dumps(skeleton, allow_nan=False)), tensors)
    assert back == state
    assert repr(back) == repr(state) or isinstance(state, dict)  # tuples stay tuples, 1.0 stays a float


def test_nan_survives():
    skeleton, _ = flatten({"loss": float("nan")})
    assert np.isnan(unflatten(skeleton, {})["loss"])


def test_tensors_and_arrays_are_taken_out_under_their_path():
    state = {
        "model": {"w": torch.ones(2)},
        "list": [np.arange(3)],
        "numbers": {0: torch.zeros(1)},
        "scalar": np.float32(2),
    }
    skeleton, tensors = flatten(state)
    assert sorted(tensors) == ["list.0", "model.w", "numbers.0"]
    back = unflatten(skeleton, tensors)
    assert torch.equal(back["list"][0], torch.arange(3))
    assert back["numbers"][0] is tensors["numbers.0"]
    assert back["scalar"] == 2.0


def test_paths_that_look_alike_stay_apart():
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    back = unflatten(*flatten(state))
    assert (back["a.b"].item(), back["a"]["b"].item()) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [1, object()]}}, r"a\.b\.1 is a object, which cannot be stored without pickle"),
        ({"f": len}, "store tensors, numbers, strings"),
        ({"s": {1, 2}}, "s is a set"),
        ({(1, 2): 3}, r"key \(1, 2\) at \(root\)"),
    ],
)
def test_what_cannot_be_stored_is_named(state, message):
    with pytest.raises(ConfigError, match=message):
        flatten(state)


@pytest.mark.parametrize(
    "skeleton",
    [
        {"$tensor": "missing"},
        {"$unknown": 1},
        {"$float": "nonsense"},
        {"$bytes": "xyz"},
        {"$tensor": "a", "$tuple": []},
        {"$dict": [[1]]},
        {"$tensor": []},
    ],
)
def test_a_damaged_skeleton_is_corrupt(skeleton):
    with pytest.raises(CorruptDataError):
        unflatten(skeleton, {})


def test_a_skeleton_of_absurd_depth_is_refused():
    skeleton = []
    for _ in range(500):
        skeleton = [skeleton]
    with pytest.raises(CorruptDataError, match="nested deeper"):
        unflatten(skeleton, {})


def test_a_state_nested_too_deep_is_refused_before_it_is_saved():
    state = 1
    for _ in range(150):
        state = [state]
    with pytest.raises(ConfigError, match="nested deeper than 100 levels"):
        flatten(state)


@pytest.mark.parametrize("array", [np.arange(4, dtype=">i4"), np.arange(6)[::-2], np.array(2.5)])
def test_arrays_of_any_byte_order_and_stride_are_stored(array):
    back = unflatten(*flatten({"a": array}))["a"]
    assert back.shape == array.shape
    assert back.tolist() == array.tolist()


def test_arrays_torch_cannot_hold_are_named():
    with pytest.raises(ConfigError, match=r"state value a\.b is an array of <U1"):
        flatten({"a": {"b": np.array(["x"])}})


@pytest.mark.parametrize("state", [{"$tensor": "x"}, {"$new": 1}, {"a": {"$tuple": [1]}}])
def test_keys_that_look_like_marks_come_back(state):
    assert unflatten(*flatten(state)) == state
