import multiprocessing
from datetime import UTC, datetime

import pytest

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.repository import Entry, Repository, parse_reference
from datasvc.repository.logs.tags import choose_move


@pytest.fixture
def repository(url):
    """Five versions of `cnn`; `prod` stood on 1, 3, nothing, and stands on 4."""
    made = Repository.create(url)
    for _ in range(5):
        made.versions("models", "cnn").append(lambda _head: {})
    made.tag("models", "cnn@1", "prod")
    made.tag("models", "cnn@3", "prod")
    made.untag("models", "cnn", "prod")
    made.tag("models", "cnn@4", "prod")
    return made


def number(repository, ref):
    return repository.resolve("models", ref).version


def places(repository, tag="prod"):
    return [move.content["version"] for move in repository.tag_history("models", "cnn", tag)]


def test_a_reference_goes_back_along_the_moves_of_a_tag(repository):
    assert places(repository) == [1, 3, None, 4]
    assert [number(repository, f"cnn@prod~{back}") for back in (0, 2, 3)] == [4, 3, 1]
    with pytest.raises(NotFoundError, match=r"cnn@prod~1 has no version: .* the version before it is cnn@prod~2"):
        number(repository, "cnn@prod~1")
    with pytest.raises(NotFoundError, match="the oldest version of the tag is cnn@prod~3"):
        number(repository, "cnn@prod~4")


@pytest.mark.parametrize("ref", ["cnn@prod~", "cnn@prod~x", "cnn@prod~-1", "cnn@3~1", "cnn@~1", "cnn~1"])
def test_what_counts_no_moves_of_a_tag_is_refused(ref):
    with pytest.raises(ConfigError):
        parse_reference(ref)


def test_a_tag_moves_only_from_where_it_is_expected(repository):
    with pytest.raises(ConflictError, match=r"cnn@prod points at version 4, expected version 3"):
        repository.tag("models", "cnn@5", "prod", expect=3)
    with pytest.raises(ConflictError, match="points at version 4, expected no version"):
        repository.tag("models", "cnn@5", "prod", expect=0)
    with pytest.raises(ConflictError, match="points at no version, expected version 1"):
        repository.tag("models", "cnn@5", "new", expect=1)
    with pytest.raises(ConflictError):
        repository.untag("models", "cnn", "prod", expect=5)
    assert places(repository) == [1, 3, None, 4]
    repository.tag("models", "cnn@5", "prod", expect=4)
    repository.tag("models", "cnn@1", "new", expect=0)
    assert repository.tags("models", "cnn") == {"prod": 5, "new": 1}


def test_a_tag_that_stands_there_already_is_not_moved_again(repository):
    repository.tag("models", "cnn@4", "prod")
    repository.tag("models", "cnn@4", "prod", expect=4)
    assert places(repository) == [1, 3, None, 4]
    with pytest.raises(ConflictError):
        repository.tag("models", "cnn@4", "prod", expect=1)


def test_a_tag_that_is_taken_away_is_gone_and_its_history_stays(repository):
    repository.untag("models", "cnn", "prod", expect=4)
    assert repository.tags("models", "cnn") == {}
    assert places(repository)[-2:] == [4, None]
    with pytest.raises(NotFoundError, match="no tag 'prod'"):
        repository.untag("models", "cnn", "prod")
    with pytest.raises(NotFoundError, match="no tag 'beta'"):
        repository.untag("models", "cnn", "beta")


def move_from_4(url, to, outcomes):
    try:
        Repository.open(url).tag("models", f"cnn@{to}", "prod", expect=4)
        outcomes.put(to)
    except ConflictError:
        outcomes.put(0)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_of_two_processes_that_move_a_tag_from_one_place_one_wins(tmp_path):
    repository = Repository.create(str(tmp_path / "r"))
    for _ in range(6):
        repository.versions("models", "cnn").append(lambda _head: {})
    repository.tag("models", "cnn@4", "prod")
    context = multiprocessing.get_context("spawn")
    outcomes = context.Queue()
    jobs = [context.Process(target=move_from_4, args=(repository.url, to, outcomes)) for to in (5, 6)]
    [job.start() for job in jobs]
    heard = sorted(outcomes.get(timeout=60) for _ in jobs)
    [job.join() for job in jobs]
    assert heard[0] == 0
    assert places(repository) == [4, heard[1]]


def moves(*days):
    return [
        Entry(place, {"version": place, "created": f"2026-11-{day:02}T00:00:00+00:00"})
        for place, day in enumerate(days, 1)
    ]


@pytest.mark.parametrize(("day", "place"), [(1, None), (2, 1), (3, 1), (5, 2), (30, 3)])
def test_where_a_tag_stood_at_a_time_is_the_last_move_until_then(day, place):
    found = choose_move(moves(2, 4, 6), datetime(2026, 11, day, tzinfo=UTC))
    assert (found and found.number) == place


def test_a_clock_that_was_wrong_does_not_change_the_order_of_moves():
    found = choose_move(moves(20, 4, 6), datetime(2026, 11, 25, tzinfo=UTC))
    assert found.number == 3
    with pytest.raises(CorruptDataError, match="has no valid time"):
        choose_move([Entry(1, {"version": 1})], datetime.now(UTC))
