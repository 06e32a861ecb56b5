import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.models.tensors.name_filter import map_names, parse_name_map, select_names

NAMES = ["model.layer1.weight", "model.layer4.0.weight", "model.layer4.1.bias", "model.layer41.bias", "optimizer.lr"]
SEGMENTS = st.lists(st.sampled_from(["a", "b", "ab", "0"]), min_size=1, max_size=4).map(".".join)


def test_a_star_crosses_dots_and_a_bare_pattern_means_whole_segments():
    assert select_names(NAMES, ["model.layer4.*"]) == NAMES[1:3]
    assert select_names(NAMES, ["model.layer4"]) == NAMES[1:3]
    assert select_names(NAMES, ["model.layer4.1.bias"]) == NAMES[2:3]
    assert select_names(NAMES, ["model"], exclude=["*.bias"]) == NAMES[:2]
    assert select_names(NAMES, ["optimizer", "model.layer1"]) == [NAMES[0], NAMES[4]]
    assert select_names(NAMES) == NAMES
    assert select_names(NAMES, "model.layer1", exclude="optimizer") == NAMES[:1]


def test_a_pattern_that_matches_nothing_is_refused_and_says_what_is_near():
    with pytest.raises(ConfigError, match=r"no tensor matches 'model.layer5.\*'; there are 5, such as 'model.layer4"):
        select_names(NAMES, ["model.layer1", "model.layer5.*"])
    with pytest.raises(ConfigError, match=r"no tensor matches 'optimiser.\*'; there are 5"):
        select_names(NAMES, ["model"], exclude=["optimiser.*"])
    with pytest.raises(ConfigError, match="nothing is left of 5 tensors"):
        select_names(NAMES, exclude=["*"])


def test_a_name_with_brackets_is_a_pattern_of_itself():
    assert select_names(["model.a[0].w", "model.b"], ["model.a[0].w"]) == ["model.a[0].w"]


def test_names_are_mapped_by_prefixes_and_expressions_one_after_the_other():
    rules = parse_name_map(["model=", "layer4=head", r"re:^layer(\d+)\.=stage.\1."])
    assert list(map_names(NAMES, rules).values()) == [
        "stage.1.weight",
        "head.0.weight",
        "head.1.bias",
        "stage.41.bias",
        "optimizer.lr",
    ]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("model.layer4.1.bias=model.layer1.weight", "makes .* both 'model.layer1.weight'"),
        ("modle=net", "matches no tensor; there are 5, such as"),
        ("optimizer.lr=", "leaves an empty name"),
        ("re:(=x", "is not a valid regular expression"),
        (r"re:a=\7", "is not a valid regular expression"),
        ("model", "is not a valid name map"),
        ("=x", "is not a valid name map"),
        ("re:=x", "has no old name"),
    ],
)
def test_a_map_that_cannot_be_meant_is_refused(rule, message):
    with pytest.raises(ConfigError, match=message):
        map_names(NAMES, parse_name_map([rule]))


@given(st.sets(SEGMENTS, min_size=1), SEGMENTS)
def test_a_prefix_that_is_put_before_all_names_can_be_taken_away_again(names, prefix):
    there = map_names(sorted(names), {r"re:^": f"{prefix}."})
    back = map_names(there.values(), {prefix: ""})
    assert {back[new] for new in there.values()} == names
    assert all(back[there[name]] == name for name in names)
