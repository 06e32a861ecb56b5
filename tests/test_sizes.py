import pytest

from datasvc.errors import ConfigError
from datasvc.sizes import format_size, group_by_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("50GB", 50 * 10**9),
        ("1.5 kB", 1500),
        ("64MiB", 64 << 20),
        ("2TiB", 2 << 40),
        ("7g", 7 * 10**9),
    ],
)
def test_sizes_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "10 apples", "1.2.3", "0x10"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="is not a valid size"):
        parse_size(text)


def test_sizes_for_people():
    assert [format_size(size) for size in (12, 1500, 2_000_000, 3.5e9, 1e12)] == [
        "12 bytes", "1.50 kB", "2.00 MB", "3.50 GB", "1.00 TB",
    ]  # fmt: skip


def test_groups_are_consecutive_and_only_a_larger_value_exceeds_the_limit():
    sizes = [3, 4, 3, 0, 11, 0, 10, 1]
    assert list(group_by_size(sizes, int, 10)) == [[3, 4, 3, 0], [11], [0, 10], [1]]
    assert list(group_by_size([], int, 10)) == []


def test_a_value_above_the_limit_is_yielded_before_the_next_one_is_made():
    made = []
    groups = group_by_size((made.append(size) or size for size in (11, 12)), int, 10)
    assert next(groups) == [11]
    assert made == [11]
