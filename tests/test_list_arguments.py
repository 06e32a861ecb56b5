"""A string where a list is expected is refused: each of its letters would be an element."""

import pytest

from datasvc.api import DataRepository
from datasvc.errors import ConfigError


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda repo: repo.datasets.remove("pets@1"), "refs is the string 'pets@1'"),
        (lambda repo: repo.datasets.mark_lost("pets@1"), "refs is the string 'pets@1'"),
        (lambda repo: repo.datasets.combine("pets", "all"), "refs is the string 'pets'"),
        (lambda repo: repo.datasets.repair("pets", "/backup"), "copies is the string '/backup'"),
        (lambda repo: repo.models.mark_lost("m@1"), "refs is the string 'm@1'"),
        (lambda repo: repo.models.compare("m@1"), "refs is the string 'm@1'"),
        (lambda repo: repo.models.repair("m@1", "/backup"), "copies is the string '/backup'"),
        (lambda repo: repo.models.lost_versions("m"), "names is the string 'm'"),
        (lambda repo: repo.models.trained_on("m", keys=["a"]), "refs is the string 'm'"),
        (lambda repo: repo.models.trained_on(keys="ab"), "keys is the string 'ab'"),
        (lambda repo: repo.models.push("/other", "m@1"), "refs is the string 'm@1'"),
        (lambda repo: repo.datasets.name_classes("pets", "cat"), "names is the string 'cat'"),
    ],
)
def test_a_string_is_no_list(repository, call, argument):
    value = argument.rpartition(" ")[2]
    with pytest.raises(ConfigError, match="expected a list") as caught:
        call(DataRepository(repository))
    assert str(caught.value).startswith(argument)
    assert f"[{value}]" in str(caught.value)
