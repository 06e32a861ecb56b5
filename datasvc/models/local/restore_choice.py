"""Chooses what a restore without a reference returns: a version on the nodes, or one of the repository. Pure.

The rule is: of the branch that the nodes continue, the version with the most steps, on nodes or in the repository,
unless another branch has committed to the repository since. What is lost is never left out in silence: it is in the
choice, and a start from nothing is refused where there was something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from datasvc.errors import CorruptDataError, UnavailableError
from datasvc.models.local.local_saves import LocalVersion
from datasvc.printable import count_text

LOCAL_FORMAT: Final = 1
"""Format of the folder of a node, in each of its records."""


class RepositoryHead(NamedTuple):
    """The newest version of a model in the repository.

    Attributes:
        number: its number; 0: the model has no version.
        step: number of optimizer steps of its weights; -1 without a version.
        branch: id of the branch that committed it; "": it was saved without versions on nodes.
    """

    number: int = 0
    step: int = -1
    branch: str = ""


class NodeCandidate(NamedTuple):
    """A version on the nodes, and what these nodes lack of it, as a part of a sentence; "": they have all of it."""

    version: LocalVersion
    lacks: str


@dataclass(frozen=True)
class RestoreChoice:
    """What to restore.

    Attributes:
        version: version on the nodes; None: the newest of the repository, or nothing if it has none.
        lost_steps: steps of the newest version on the nodes that are lost, because they no longer have all of it.
        warnings: texts for the log.
    """

    version: LocalVersion | None
    lost_steps: int = 0
    warnings: tuple[str, ...] = ()


def choose_restore(
    name: str,
    candidates: Sequence[NodeCandidate],
    branch: NodeBranch,
    head: RepositoryHead | None,
    *,
    head_error: str = "",
    max_lost_steps: int | None = None,
) -> RestoreChoice:
    """Return what to restore.

    Args:
        name: name of the model.
        candidates: versions of the branch that the nodes continue, newest first; the first one that is complete must
            be the last of them.
        branch: the branch.
        head: newest version of the repository; None: it cannot be read.
        head_error: why it cannot be read, for the messages.
        max_lost_steps: see `LocalSaves`.

    Raises:
        UnavailableError: the versions on the nodes are not complete, and there is nothing else to restore; or more
            than `max_lost_steps` would be lost.
    """
    if not candidates:
        return RestoreChoice(None)
    newest = candidates[0].version
    is_own = head is not None and head.branch == branch.id
    if head is not None and not is_own and head.number > (branch.head or 0):
        reason = (
            f"{newest} is not used: {name}@{head.number} is in the repository, and is of another run than the "
            "versions on these nodes, which began before it. They are removed when this run saves to the nodes"
        )
        return RestoreChoice(None, warnings=(reason,))
    # A head that the branch has not committed itself was there before the branch began, however many steps it has.
    saved_step = head.step if head is not None and is_own else -1
    if saved_step > newest.step:
        return RestoreChoice(None)
    incomplete = [f"{version} is not complete: {lacks}" for version, lacks in candidates if lacks]
    best = candidates[-1].version if not candidates[-1].lacks else None
    if best is not None and saved_step > best.step:
        best = None
    unread = f"the repository cannot be read: {head_error}"
    if best is newest:
        unchecked = (f"{best} is restored, and the repository may have a newer version: {unread}",)
        return RestoreChoice(best, warnings=() if head is not None else unchecked)
    if best is None and (head is None or not head.number):
        instead = unread if head is None else f"the repository has no version of {name!r}"
        raise UnavailableError(
            f"cannot restore {name!r}: {'; '.join(incomplete)}; and {instead}. Start the missing nodes again, with "
            "their folders; to begin anew without these versions, remove the folder of the model on all nodes"
        )
    return _fall_back(name, newest, best, head, incomplete, max_lost_steps)


def _fall_back(
    name: str,
    newest: LocalVersion,
    best: LocalVersion | None,
    head: RepositoryHead | None,
    incomplete: Sequence[str],
    max_lost_steps: int | None,
) -> RestoreChoice:
    """Return the choice of an older version: `best`, or `head` without it."""
    if best is not None:
        restored = f"{best}"
        step = best.step
    else:
        assert head is not None
        restored, step = f"{name}@{head.number}, step {head.step}", head.step
    # A version of the repository may be of another branch, and have more steps.
    lost_steps = max(0, newest.step - step)
    if max_lost_steps is not None and lost_steps > max_lost_steps:
        raise UnavailableError(
            f"a restore of {restored}, would lose {count_text(lost_steps, 'step')}, and max_lost_steps is "
            f"{max_lost_steps}: {'; '.join(incomplete)}. Start the missing nodes again, raise max_lost_steps of "
            "LocalSaves, or give ref="
        )
    text = f"{restored}, is restored instead: {count_text(lost_steps, 'step')} lost"
    return RestoreChoice(best, lost_steps, (*incomplete, text))


# A *branch* is a sequence of versions of which each continues the one before. A job begins a branch with each
# restore, and before its first save if it restores nothing. All nodes write the same record before the job continues,
# and the generation, a number, is higher than in every record of these nodes. So a node that was away, and comes back
# with versions of an older generation, does not bring back what the job has left, however many steps they have.


@dataclass(frozen=True)
class NodeBranch:
    """The branch that the nodes continue.

    Attributes:
        generation: number of the branch, from 1; 0: the nodes have none yet.
        id: random text. The entry of each version of the branch has it, in the repository too.
        head: number of the newest version in the repository when the branch began; 0: there was none, None: the
            repository did not answer.
        base: folder name of the version on the nodes that the branch continues; None: it continues none of them.
    """

    generation: int = 0
    id: str = ""
    head: int | None = None
    base: str | None = None

    def to_record(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {"format": LOCAL_FORMAT, **vars(self)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], path: object) -> NodeBranch:
        """Return the branch of a file. Raises CorruptDataError: a field is missing, or has a wrong type."""
        generation, branch, head, base = (record.get(name) for name in ("generation", "id", "head", "base"))
        is_valid = (
            type(generation) is int
            and isinstance(branch, str)
            and (head is None or type(head) is int)
            and (base is None or isinstance(base, str))
        )
        if not is_valid:
            raise CorruptDataError(f"{path} is not the record of a branch; remove it with the folder that it is in")
        assert isinstance(generation, int)
        return cls(generation, str(branch), head, base)
