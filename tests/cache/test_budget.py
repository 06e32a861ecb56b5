import shutil

import pytest

from datasvc.cache.budget import parse_budget
from datasvc.errors import ConfigError


def test_a_share_is_one_of_the_disk(tmp_path):
    total = shutil.disk_usage(tmp_path).total
    assert parse_budget("10%", tmp_path / "not" / "there" / "yet") == int(total * 0.1)


@pytest.mark.parametrize("text", ["0", "0%", "0GB"])
def test_a_budget_of_nothing_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match="holds nothing"):
        parse_budget(text, tmp_path)
