"""The branch of a training that the versions on the nodes belong to: one small file on each node, for each model.

A *branch* is a sequence of versions of which each continues the one before. A job begins a branch with each restore,
and before its first save if it restores nothing. All nodes write the same record before the job continues, and the
generation, a number, is higher than in every record of these nodes. So a node that was away, and comes back with
versions of an older generation, does not bring back what the job has left, however many steps they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from datasvc.errors import CorruptDataError

LOCAL_FORMAT: Final = 1
"""Format of the folder of a node, in each of its records."""


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
