import shutil

import pytest

from datasvc.cache import Cache
from datasvc.cache.catalogue.configuration import parse_budget
from datasvc.errors import ConfigError


def test_a_share_is_one_of_the_disk(tmp_path):
    total = shutil.disk_usage(tmp_path).total
    assert parse_budget("10%", tmp_path / "not" / "there" / "yet") == int(total * 0.1)


@pytest.mark.parametrize(
    ("text", "size"), [("50GB", 50 * 10**9), (" 1.5 KiB ", 1536), ("4096", 4096), ("2tb", 2 * 10**12)]
)
def test_a_budget_is_a_size(text, size, tmp_path):
    assert parse_budget(text, tmp_path) == size


@pytest.mark.parametrize("text", ["0", "0%", "0GB"])
def test_a_budget_of_nothing_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match="expected more than 0 bytes"):
        parse_budget(text, tmp_path)


@pytest.mark.parametrize("text", ["-1", "x", "", "%", "-5%", "10 percent", "1e9", "nan", "101%", "9" * 400])
def test_what_is_no_budget_is_refused_before_the_folder_is_made(text, tmp_path):
    with pytest.raises(ConfigError):
        Cache(tmp_path / "cache", budget=text)
    assert not (tmp_path / "cache").exists()
