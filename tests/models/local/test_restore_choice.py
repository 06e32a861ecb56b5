"""What a restore without a reference returns, of what the nodes and the repository have."""

import pytest

from datasvc.errors import UnavailableError
from datasvc.models import LocalVersion
from datasvc.models.local.restore_choice import NodeBranch, NodeCandidate, RepositoryHead, choose_restore

BRANCH = NodeBranch(3, "own", head=4)
NOTHING = RepositoryHead()


def version(step, generation=3):
    return LocalVersion("models", "m", 0, generation, step, "0" * 16)


def choose(steps, head=NOTHING, **options):
    """`steps`: by step, newest first, what is missing of the version."""
    return choose_restore(
        "m", [NodeCandidate(version(step), lacks) for step, lacks in steps.items()], BRANCH, head, **options
    )


@pytest.mark.parametrize(
    ("steps", "head", "step", "lost_steps"),
    [
        ({}, NOTHING, None, 0),
        ({9: ""}, NOTHING, 9, 0),
        ({9: ""}, None, 9, 0),
        ({9: "x", 7: ""}, NOTHING, 7, 2),
        # The same branch in the repository: who has more steps; the disk of the node is nearer if both have as many.
        ({9: ""}, RepositoryHead(5, 8, "own"), 9, 0),
        ({9: ""}, RepositoryHead(5, 9, "own"), 9, 0),
        ({9: ""}, RepositoryHead(5, 10, "own"), None, 0),
        ({9: "x", 7: ""}, RepositoryHead(5, 8, "own"), None, 1),
        ({9: "x"}, RepositoryHead(5, 9, "own"), None, 0),
        ({9: "x"}, RepositoryHead(5, 10, "own"), None, 0),
        # A version that was there when the branch began: the branch is newer, however many steps that has.
        ({3: ""}, RepositoryHead(4, 99, "other"), 3, 0),
        ({9: "x"}, RepositoryHead(4, 6, ""), None, 3),
        ({3: "x"}, RepositoryHead(4, 99, "other"), None, 0),
        # One that another run has committed since.
        ({9: ""}, RepositoryHead(5, 8, "other"), None, 0),
        ({9: ""}, RepositoryHead(5, 8, ""), None, 0),
    ],
)
def test_the_newest_of_the_branch_is_restored_and_what_is_lost_is_counted(steps, head, step, lost_steps):
    found = choose(steps, head)
    assert (found.version and found.version.step, found.lost_steps) == (step, lost_steps)
    if lost_steps:
        assert "is not complete: x" in found.warnings[0]
        assert found.warnings[-1].endswith(f"is restored instead: {lost_steps} step{'s' * (lost_steps > 1)} lost")


def test_versions_on_the_nodes_that_another_run_has_passed_are_refused_by_name():
    (warning,) = choose({9: ""}, RepositoryHead(5, 8, "other")).warnings
    assert warning.startswith("m, step 9, on the nodes is not used: m@5 is in the repository, and is of another run")


@pytest.mark.parametrize("head", [NOTHING, None])
def test_nothing_is_begun_anew_where_the_nodes_have_a_part(head):
    with pytest.raises(
        UnavailableError, match=r"m, step 9, on the nodes is not complete: node b is missing; and the rep"
    ):
        choose({9: "node b is missing"}, head)


def test_the_reason_why_the_repository_cannot_be_read_is_told():
    (warning,) = choose({9: ""}, None, head_error="m@4 is corrupt").warnings
    assert "may have a newer version: the repository cannot be read: m@4 is corrupt" in warning
    with pytest.raises(UnavailableError, match=r"cannot be read: access denied. Start"):
        choose({9: "node b is missing"}, None, head_error="access denied")


def test_a_limit_of_lost_steps_refuses_more():
    assert choose({9: "x", 7: ""}, max_lost_steps=2).lost_steps == 2
    with pytest.raises(UnavailableError, match="would lose 2 steps, and max_lost_steps is 1"):
        choose({9: "x", 7: ""}, max_lost_steps=1)


def test_a_head_that_was_not_known_when_the_branch_began_is_of_another_run():
    candidate = [NodeCandidate(version(9), "")]
    branch = NodeBranch(3, "own", head=None)
    assert choose_restore("m", candidate, branch, RepositoryHead(1, 5, "other")).version is None
    assert choose_restore("m", candidate, branch, RepositoryHead(1, 5, "own")).version == version(9)


def test_versions_are_ordered_by_generation_then_by_step():
    ordered = [version(9, generation=2), version(3), version(4)]
    assert sorted({*ordered}) == ordered
    assert LocalVersion.of_folder("m", version(4).folder_name) == version(4)
    assert LocalVersion.of_folder("m", ".lock") is None
