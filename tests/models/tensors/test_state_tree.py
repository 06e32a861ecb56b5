import json
import sys
from collections import OrderedDict, namedtuple
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.tensors.state_tree import decode_state, encode_state, flatten, unflatten

Moments = namedtuple("Moments", ["mean", "square"])  # noqa: PYI024 - the kind that optimizers use

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)  # infinities included
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(Moments, inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=20,
)


@given(trees)
def test_a_state_tree_comes_back_with_its_types(state):
    skeleton, tensors = flatten(state)
    back = unflatten(decode_state(encode_state(skeleton), "v"), tensors)
    assert back == state
    # Tuples stay tuples, 1.0 stays a float; dicts keep their order.
    assert repr(back) == repr(state)


@given(trees)
def test_releases_that_do_not_read_types_find_the_plain_tree(state):
    tree = json.loads(encode_state(flatten(state)[0]))["state"]
    assert tree == json.loads(encode_state(flatten(plain(state))[0]))["state"]


def plain(value):
    """Return a state without ordered dicts and named tuples."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value] if isinstance(value, list) else tuple(map(plain, value))
    return value


def test_a_named_tuple_of_an_unknown_class_gets_a_class_with_its_fields(monkeypatch):
    state = Moments(1, (2.5, "x"))
    raw = encode_state(flatten(state)[0])
    monkeypatch.delattr(sys.modules[__name__], "Moments")
    back = unflatten(decode_state(raw, "v"), {})
    assert type(back) is not type(state)
    assert (back, back.mean, back.square, repr(back)) == ((1, (2.5, "x")), 1, (2.5, "x"), repr(state))
    assert back._asdict() == state._asdict()
    assert type(deepcopy(back)) is type(back._replace(mean=3)) is type(unflatten(decode_state(raw, "v"), {}))
    assert back._replace(mean=3) == type(back)(3, square=(2.5, "x")) == (3, (2.5, "x"))


def test_a_class_that_now_has_other_fields_is_not_used(monkeypatch):
    raw = encode_state(flatten(Moments(1, 2))[0])
    monkeypatch.setattr(sys.modules[__name__], "Moments", namedtuple("Moments", ["mean", "variance"]))  # noqa: PYI024
    assert unflatten(decode_state(raw, "v"), {})._fields == ("mean", "square")


def test_tensors_that_share_all_elements_are_marked_as_tied_and_no_others():
    weight = torch.arange(6.0)
    state = {
        "a": weight,
        "tied": weight.detach(),
        "matrix": weight.view(2, 3),
        "part": weight[:3],
        "equal": weight.clone(),
        "bits": weight.view(torch.int32),
        "empty": weight[:0],
        "empty2": weight[:0],
        "imaginary": torch.zeros(3, dtype=torch.complex64).conj(),
        "meta": torch.empty(2, device="meta"),
        "meta2": torch.empty(2, device="meta"),
    }
    skeleton, _ = flatten(state)
    assert {name for name, leaf in skeleton.items() if "$tied" in leaf} == {"tied"}
    assert skeleton["tied"] == {"$tensor": "tied", "$tied": "a"}
    assert decode_state(encode_state(skeleton), "v") == skeleton


@pytest.mark.parametrize(
    "types",
    [
        5,
        [5],
        [[[], "ordered"]],
        [[["t"], "ordered"], [["t"], "named", "m", "M", ["a"]]],
        [[["t"], "named", "m", "M", ["a", "b"]]],
        [[["t"], "named", "m", "M", ["def"]]],
        [[["t"], "named", "m", 5, ["a"]]],
        [[["t"], "named"]],
        [[["t", 1], "ordered"]],
        [[["t", -1], "ordered"]],
        [[["w"], "ordered"]],
        [[["gone"], "ordered"]],
        [[["t"], "tied", "w"]],
        [[["w"], "tied", 5]],
        [[["t", 0, 0], "tied", "w"]],
    ],
)
def test_types_that_do_not_fit_the_tree_are_corrupt(types):
    tree = {"t": {"$tuple": [{"$float": "nan"}]}, "w": {"$tensor": "w"}}
    raw = json.dumps(
        {"format": 1, "state": {"$tuple": [tree]} if types == [[[], "ordered"]] else tree, "types": types}
    )
    with pytest.raises(CorruptDataError):
        unflatten(decode_state(raw.encode(), "v"), {"w": torch.ones(1)})


def test_types_of_a_later_release_are_left_out():
    raw = json.dumps({"format": 1, "state": {"a": {"b": 1}}, "types": [[["a"], "later kind", 3]]})
    assert unflatten(decode_state(raw.encode(), "v"), {}) == {"a": {"b": 1}}


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
        ({"s": {1, len}}, r"s\.0 is a builtin_function"),
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
