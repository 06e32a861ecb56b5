"""Branches: what their names refer to, what protects them, what two processes at once leave."""

import dataclasses

import pytest

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError, UnreadableVersionWarning
from datasvc.repository import Repository, branching
from datasvc.repository.branching import branch_history, create_branch, read_branches, remove_branch
from datasvc.repository.removal import mark_lost, remove_versions, swept_versions
from datasvc.shards.history.revert import revert
from datasvc.shards.versions.delete import delete
from datasvc.testing import FaultyStore
from tests.shards.written_versions import write_version


def texts(*keys):
    return [[{"key": key, "text": f"text of {key}"} for key in keys]]


@pytest.fixture
def pets(repository):
    """Versions 1 and 2 on the main line, 3 and 5 on `work`, which begins at 1, and 4 on the main line."""
    write_version(repository, "pets", {"train": texts(*"abcdef")})
    delete(repository, "pets", keys=["a"])
    create_branch(repository, "pets@1", "work")
    delete(repository, "pets@work", keys=["b"])
    delete(repository, "pets", keys=["c"])
    delete(repository, "pets@work", keys=["d"])
    return repository


def resolve(repository, ref):
    return repository.resolve("datasets", ref).version


def test_a_name_is_the_newest_version_of_the_main_line_and_a_branch_its_own(pets):
    assert [resolve(pets, ref) for ref in ("pets", "pets@latest", "pets@work", "pets@3")] == [4, 4, 5, 3]
    assert [pets.versions("datasets", "pets").read(number).content["parent"] for number in (2, 3, 4, 5)] == [
        "pets@1", "pets@1", "pets@2", "pets@3"
    ]  # fmt: skip
    assert pets.newest("datasets", "pets").version == 4
    state = pets.state("datasets", "pets")
    assert (state.newest, state.branches, state.versions) == (4, {"work": 5}, [1, 2, 3, 4, 5])


def test_a_tilde_goes_back_along_what_the_head_of_a_branch_continues(pets):
    assert [resolve(pets, f"pets@work~{back}") for back in (0, 1, 2)] == [5, 3, 1]
    with pytest.raises(NotFoundError, match=r"pets@work~3 does not exist: pets@1 is the first"):
        resolve(pets, "pets@work~3")


def test_a_tilde_goes_back_over_an_ingest_that_takes_the_place_of_the_version_before_it(repository):
    for _ in range(2):
        write_version(repository, "pets", {"train": texts("a", "b")})
    assert "parent" not in repository.versions("datasets", "pets").read(2).content
    create_branch(repository, "pets@2", "work")
    delete(repository, "pets@work", keys=["a"])
    assert [resolve(repository, f"pets@work~{back}") for back in (1, 2)] == [2, 1]
    with pytest.raises(NotFoundError, match=r"pets@work~3 does not exist: pets@1 is the first"):
        resolve(repository, "pets@work~3")


def test_the_damaged_entry_on_the_way_of_a_tilde_is_named_with_what_to_do(pets):
    damage(pets, 3)
    assert resolve(pets, "pets@work~1") == 3
    with pytest.raises(CorruptDataError, match=r"the entry of pets@3 cannot be read.*datasvc mark-lost pets@3"):
        resolve(pets, "pets@work~2")


def test_a_branch_without_versions_of_its_own_is_the_version_at_which_it_begins(pets):
    assert str(create_branch(pets, "pets@work", "deeper")) == "pets@5"
    assert resolve(pets, "pets@deeper") == 5
    delete(pets, "pets@work", keys=["e"])
    assert [resolve(pets, f"pets@{branch}") for branch in ("work", "deeper")] == [6, 5]


def test_a_removed_branch_leaves_its_versions_and_a_later_one_of_its_name_has_none_of_them(pets):
    assert str(remove_branch(pets, "pets", "work", message="done").head) == "pets@5"
    assert resolve(pets, "pets@5") == 5
    with pytest.raises(NotFoundError, match="has no tag 'work'"):
        resolve(pets, "pets@work")
    create_branch(pets, "pets@2", "work")
    assert resolve(pets, "pets@work") == 2
    delete(pets, "pets@work", keys=["f"])
    assert (resolve(pets, "pets@work"), resolve(pets, "pets")) == (6, 4)
    moves = [move.content["version"] for move in branch_history(pets, "pets", "work")]
    assert moves == [1, None, 2]


def test_a_removed_head_gives_way_to_the_version_before_it_on_its_line(pets):
    remove_versions(pets, "datasets", ["pets@5", "pets@4"])
    assert (resolve(pets, "pets@work"), resolve(pets, "pets")) == (3, 2)
    remove_versions(pets, "datasets", ["pets@3"])
    assert resolve(pets, "pets@work") == 1
    assert str(delete(pets, "pets@work", keys=["e"]).version) == "pets@6"
    assert pets.versions("datasets", "pets").read(6).content["parent"] == "pets@1"


def test_only_the_head_of_a_line_is_continued_and_a_number_means_its_own_line(pets):
    with pytest.raises(ConflictError, match=r"pets@3 is not the newest version, which is pets@5.*give pets@work"):
        delete(pets, "pets@3", keys=["e"])
    assert str(delete(pets, "pets@5", keys=["e"]).version) == "pets@6"
    assert (resolve(pets, "pets@work"), resolve(pets, "pets")) == (6, 4)


def test_the_version_at_which_a_branch_begins_is_not_removed_even_by_force(pets):
    with pytest.raises(ConfigError, match=r"the branch pets@work begins at pets@1.*--remove"):
        remove_versions(pets, "datasets", ["pets@1"], force=True)
    remove_branch(pets, "pets", "work")
    remove_versions(pets, "datasets", ["pets@1"])
    with pytest.raises(NotFoundError, match="was removed"):
        create_branch(pets, "pets@1", "again")


@pytest.mark.parametrize(
    "act",
    [
        lambda repository: remove_versions(repository, "datasets", ["pets@work"]),
        lambda repository: mark_lost(repository, "datasets", ["pets@work"]),
        lambda repository: revert(repository, "pets@work"),
    ],
)
def test_a_branch_is_not_taken_for_one_version(pets, act):
    with pytest.raises(ConfigError, match="pets@work is a branch, not one version"):
        act(pets)


def test_an_old_version_is_committed_again_to_the_line_that_is_named(pets):
    assert str(revert(pets, "pets@1", branch="work").version) == "pets@6"
    assert (resolve(pets, "pets@work"), resolve(pets, "pets")) == (6, 4)
    assert str(revert(pets, "pets@3").version) == "pets@7"
    assert (resolve(pets, "pets@work"), resolve(pets, "pets")) == (6, 7)


@pytest.mark.parametrize("name", ["main", "latest", "7", "Work", "a/b", ""])
def test_a_name_that_would_mean_something_else_is_refused(pets, name):
    with pytest.raises(ConfigError, match=r"not a valid|cannot be the name"):
        create_branch(pets, "pets", name)


def test_tags_and_branches_have_one_space_of_names(pets):
    pets.tag("datasets", "pets@2", "good")
    with pytest.raises(ConfigError, match="pets has a tag 'good'"):
        create_branch(pets, "pets", "good")
    with pytest.raises(ConfigError, match="pets has a branch 'work'"):
        pets.tag("datasets", "pets@2", "work")
    with pytest.raises(ConflictError, match="has a branch 'work' already"):
        create_branch(pets, "pets", "work")
    pets.untag("datasets", "pets", "good")
    assert str(create_branch(pets, "pets", "good")) == "pets@4"
    assert (resolve(pets, "pets@good"), pets.tags("datasets", "pets")) == (4, {})


def test_what_does_not_exist_is_named_with_what_does(pets):
    with pytest.raises(NotFoundError, match=r"pets has no tag 'wrok'; it has: none yet; its branches: work"):
        resolve(pets, "pets@wrok")
    with pytest.raises(NotFoundError, match=r"pets has no branch 'wrok'; it has: work"):
        remove_branch(pets, "pets", "wrok")
    with pytest.raises(NotFoundError, match=r"pets has no branch 'wrok'; it has: work"):
        branch_history(pets, "pets", "wrok")
    with pytest.raises(NotFoundError, match="no data set 'cats'"):
        read_branches(pets, "cats")


def test_a_tag_and_a_branch_set_by_releases_that_do_not_see_each_other_are_not_resolved_silently(pets):
    pets._tags("datasets", "pets").move("work", 2)
    with pytest.raises(ConflictError, match=r"pets has a tag and a branch 'work'"):
        resolve(pets, "pets@work")
    pets.untag("datasets", "pets", "work")
    assert resolve(pets, "pets@work") == 5


def test_a_tag_that_is_set_while_a_branch_of_its_name_is_created_leaves_at_most_one(pets, monkeypatch):
    begin = branching.Repository.branch_logs(pets, "pets").begin

    def begin_after_the_tag(self, *arguments):
        pets._tags("datasets", "pets").move("same", 2)
        return begin(*arguments)

    monkeypatch.setattr(type(pets.branch_logs("pets")), "begin", begin_after_the_tag)
    with pytest.raises(ConflictError, match="a tag 'same' of pets was set while the branch 'same' was created"):
        create_branch(pets, "pets", "same")
    assert (resolve(pets, "pets@same"), list(pets.branches("pets"))) == (2, ["work"])


def test_a_branch_that_is_created_while_a_tag_of_its_name_is_set_leaves_at_most_one(pets, monkeypatch):
    move = type(pets._tags("datasets", "pets")).move

    def move_after_the_branch(self, tag, version, **options):
        if version is not None:
            pets.branch_logs("pets").begin("same", 2, 5)
        move(self, tag, version, **options)

    monkeypatch.setattr(type(pets._tags("datasets", "pets")), "move", move_after_the_branch)
    with pytest.raises(ConflictError, match=r"a branch 'same' of pets was created at the same time.*removed again"):
        pets.tag("datasets", "pets", "same")
    assert (resolve(pets, "pets@same"), pets.tags("datasets", "pets")) == (2, {})


def test_a_version_that_is_removed_while_a_branch_begins_at_it_is_not_its_head(pets, monkeypatch):
    begin = type(pets.branch_logs("pets")).begin

    def begin_after_the_removal(self, *arguments):
        remove_versions(pets, "datasets", ["pets@2"])
        return begin(self, *arguments)

    monkeypatch.setattr(type(pets.branch_logs("pets")), "begin", begin_after_the_removal)
    with pytest.raises(ConflictError, match="pets@2 was removed while the branch 'late' was created"):
        create_branch(pets, "pets@2", "late")
    assert list(pets.branches("pets")) == ["work"]


def test_a_removal_during_which_a_branch_begins_at_the_version_is_reverted(pets, monkeypatch):
    removals = type(pets.removals("datasets", "pets"))
    add = removals.add

    def add_after_the_branch(self, *arguments):
        pets.branch_logs("pets").begin("late", 2, 5)
        return add(self, *arguments)

    monkeypatch.setattr(removals, "add", add_after_the_branch)
    with pytest.raises(ConflictError, match=r"made branches during the removal: \{'late': 2\} stay"):
        remove_versions(pets, "datasets", ["pets@2"])
    assert resolve(pets, "pets@late") == 2


def test_a_removal_that_ended_before_it_was_reverted_takes_nothing_from_a_branch(pets):
    pets.removals("datasets", "pets").add([1])
    assert resolve(pets, "pets@1") == 1
    assert swept_versions(pets, "datasets", "pets", 1e12) == frozenset()
    remove_versions(pets, "datasets", ["pets@3", "pets@5"])
    assert resolve(pets, "pets@work") == 1
    assert 1 not in pets.state("datasets", "pets").removed


def damage(repository, number):
    path = repository.storage.local_path(f"datasets/pets/versions/{number:08d}.json")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"created", b"crested"))


def test_while_the_newest_entry_cannot_be_read_no_line_falls_back_to_an_older_version(pets):
    damage(pets, 5)
    for ref in ("pets", "pets@work"):
        with pytest.raises(CorruptDataError, match=r"which branch pets@5 is on.*datasvc mark-lost pets@5"):
            resolve(pets, ref)
    with pytest.raises(CorruptDataError):
        delete(pets, "pets@4", keys=["e"])
    assert resolve(pets, "pets@4") == 4
    assert (pets.state("datasets", "pets").newest, pets.state("datasets", "pets").branches) == (None, {})
    mark_lost(pets, "datasets", ["pets@5"])
    assert (resolve(pets, "pets"), resolve(pets, "pets@work")) == (4, 3)
    assert str(delete(pets, "pets@work", keys=["e"]).version) == "pets@6"


def test_a_damaged_entry_hides_only_the_branches_whose_heads_it_may_be(pets):
    create_branch(pets, "pets@1", "early")
    create_branch(pets, "pets@5", "late")
    delete(pets, "pets@late", keys=["e"])
    damage(pets, 5)
    # Version 6 names the newest version of each line before it. That of `work` is the damaged one.
    state = pets.state("datasets", "pets")
    assert (state.newest, state.branches) == (4, {"early": 1, "late": 6})
    with pytest.warns(UnreadableVersionWarning, match=r"pets@work is left out: .*mark-lost pets@5") as warned:
        found = read_branches(pets, "pets")
    assert [str(each.message).partition(" ")[0] for each in warned] == ["pets@work"]
    assert {name: (branch.head.version, branch.start.version) for name, branch in found.items()} == {
        "early": (1, 1), "late": (6, 5)
    }  # fmt: skip


def test_a_branch_that_ends_or_begins_while_branches_are_read_is_left_out_or_has_its_head(pets, monkeypatch):
    state = pets.known_state("datasets", "pets")
    without = dataclasses.replace(state, branches={})
    monkeypatch.setattr(pets, "known_state", lambda *_arguments: without)
    assert str(read_branches(pets, "pets")["work"].head) == "pets@5"
    known = pets.branches("pets")
    remove_branch(pets, "pets", "work")
    monkeypatch.setattr(pets, "branches", lambda _name: known)
    assert read_branches(pets, "pets") == {}


def test_a_data_set_without_branches_reads_its_damaged_newest_entry_as_ever(repository):
    for _ in range(2):
        write_version(repository, "pets", {"train": texts("a", "b")})
    damage(repository, 2)
    assert resolve(repository, "pets") == 2


def test_a_damaged_move_of_a_branch_leaves_it_out_and_can_be_removed(pets):
    path = pets.storage.local_path("datasets/pets/versions/branches/work/00000001.json")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"created", b"crested"))
    with pytest.warns(UnreadableVersionWarning, match=r"pets@work is left out.*datasvc branch pets work --remove"):
        assert read_branches(pets, "pets") == {}
    with pytest.warns(UnreadableVersionWarning):
        assert remove_branch(pets, "pets", "work") is None
    assert pets.branches("pets", strict=True) == {}


def test_entries_of_a_data_set_without_branches_have_no_field_of_branches(repository):
    write_version(repository, "pets", {"train": texts(*"abc")})
    delete(repository, "pets", keys=["a"])
    create_branch(repository, "pets", "idle")
    delete(repository, "pets", keys=["b"])
    for number in (1, 2, 3):
        content = repository.versions("datasets", "pets").read(number).content
        assert (content["format"], content.keys() & {"branch", "lines"}) == (1, set())


def test_a_version_that_a_release_without_branches_commits_is_on_the_main_line(pets):
    write_version(pets, "pets", {"train": texts("z")})
    assert "lines" not in pets.versions("datasets", "pets").read(6).content
    assert (resolve(pets, "pets"), resolve(pets, "pets@work")) == (6, 5)
    delete(pets, "pets@work", keys=["e"])
    assert (resolve(pets, "pets"), resolve(pets, "pets@work")) == (6, 7)
    assert pets.versions("datasets", "pets").read(7).content["lines"] == {"": 6, "work/1": 5}


def test_a_first_branch_and_a_version_on_it_during_a_walk_of_a_local_folder_are_not_taken_for_the_main_line(
    repository, monkeypatch
):
    """The walk finds the version but not the log of its branch, which was made while it ran."""
    write_version(repository, "pets", {"train": texts(*"abc")})
    find = type(repository.storage).find

    def find_during_the_commit(self, folder):
        is_first = folder == "datasets/pets" and not repository.branch_logs("pets").list_moves()
        if is_first:
            monkeypatch.setattr(type(repository.storage), "find", find)
            create_branch(repository, "pets", "work")
            delete(repository, "pets@work", keys=["a"])
        found = find(self, folder)
        return [path for path in found if "branches" not in path] if is_first else found

    monkeypatch.setattr(type(repository.storage), "find", find_during_the_commit)
    assert resolve(Repository.open(repository.url), "pets") == 1


def test_a_branch_costs_a_request_or_two_where_there_are_branches_and_nothing_elsewhere():
    with FaultyStore() as store:
        repository = Repository.create(store.url)
        write_version(repository, "pets", {"train": texts(*"abcdefgh")})

        def requests_of(ref):
            before = len(store.requests)
            resolve(repository, ref)
            return [operation for operation, _ in store.requests[before:]]

        assert requests_of("pets") == ["list"]
        create_branch(repository, "pets", "work")
        for key in "abcdef":
            delete(repository, "pets@work", keys=[key])
        assert requests_of("pets") == ["list", "read", "read"]
        assert requests_of("pets@work") == ["list", "read", "read"]  # its log, and the newest entry
        assert requests_of("pets@3") == ["list"]
