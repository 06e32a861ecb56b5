import argparse
import dataclasses

import pytest

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.config import TrainConfig, setting_fields, setting_groups
from datasvc.trainer.recipes.settings.groups.setting_group import field_types
from datasvc.trainer.recipes.settings.options import _make_parser

REQUIRED = {"data": "d@1", "repo": "r", "name": "m"}


def options_by_section():
    parser = _make_parser("train")
    return {
        section.title: {action.dest: action for action in section._group_actions} for section in parser._action_groups
    }


def test_each_setting_belongs_to_one_group():
    names = [field.name for field in setting_fields()]
    assert len(names) == len(set(names))
    assert set(names) == {field.name for field in dataclasses.fields(TrainConfig)}
    assert list(TrainConfig(**REQUIRED).to_dict()) == names


@pytest.mark.parametrize("group", setting_groups())
def test_a_group_is_a_section_of_the_help_with_choices_defaults_and_units(group):
    actions = options_by_section()[group.title]
    assert list(actions) == [field.name for field in dataclasses.fields(group)]
    for field in dataclasses.fields(group):
        action, field_type = actions[field.name], field_types(group)[field.name]
        assert ("(default: " in action.help) == (field.default not in {dataclasses.MISSING, None})
        if isinstance(action, argparse.BooleanOptionalAction):
            continue
        assert action.metavar not in (None, "", "VALUE", ()), f"{field.name} has no unit or kind: give it a Metavar"
        assert all(choice in action.metavar for choice in field_type.choices)
        if isinstance(action.metavar, tuple):
            assert len(action.metavar) == field_type.length


@pytest.mark.parametrize("group", setting_groups())
def test_a_value_outside_of_choices_or_range_is_refused_with_the_expected_ones(group):
    for name, field_type in field_types(group).items():
        if field_type.choices:
            with pytest.raises(ConfigError, match=f"^{name} is 'other'; expected one of {field_type.choices[0]}"):
                TrainConfig(**{**REQUIRED, name: "other"})
        if field_type.range is not None:
            for value in (field_type.range.minimum - 1, field_type.range.below, float("nan")):
                with pytest.raises(ConfigError, match=f"^{name} is .*; expected "):
                    TrainConfig(**{**REQUIRED, name: (value,) * 2 if field_type.is_tuple else value})
