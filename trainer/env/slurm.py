"""What Slurm says in the environment: the nodes of an allocation and the tasks on each. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

_MAX_NUM_NODES = 1 << 20
# A name is pieces of text and of ranges in brackets; commas outside of brackets separate names.
_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_node_list(text: str) -> list[str]:
    """The names in a list as `node[01-03,07],login`, in its order.

    Raises:
        ValueError: it is no such list.
    """
    names = []
    position = 0
    for match in _NAME.finditer(text):
        if text[position : match.start()] not in ({""} if position == 0 else {","}):
            break
        position = match.end()
        pieces = [list(_expand_piece(piece, text)) for piece in _PIECE.finditer(match[0])]
        names += ["".join(parts) for parts in itertools.islice(itertools.product(*pieces), _MAX_NUM_NODES + 1)]
        if len(names) > _MAX_NUM_NODES:
            raise ValueError(f"{text!r} names more than {_MAX_NUM_NODES} nodes")
    if position != len(text) or not names:
        raise ValueError(f"{text!r} is not a list of nodes such as node[01-03,07],login")
    return names


def expand_task_counts(text: str, num_nodes: int) -> list[int]:
    """The number of tasks on each node, from `4(x2),3` or, the same on each, `4`.

    Raises:
        ValueError: it is no such list, or not one of this many nodes.
    """
    counts = _list_counts(text)
    if len(counts) == 1:
        return counts * num_nodes
    if len(counts) != num_nodes:
        raise ValueError(f"{text!r} counts the tasks of {len(counts)} nodes, not of {num_nodes}")
    return counts


def _list_counts(text: str) -> list[int]:
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of tasks per node such as 4(x2),3")
        repeat = int(match[2] or 1)
        if len(counts) + repeat > _MAX_NUM_NODES:
            raise ValueError(f"{text!r} names more than {_MAX_NUM_NODES} nodes")
        counts += [int(match[1])] * repeat
    return counts


def read_nodes(environ: Mapping[str, str]) -> list[tuple[str, int]] | None:
    """The nodes of the allocation that this process runs in, with the tasks on each; None outside of any.

    `SLURM_TASKS_PER_NODE` goes before `SLURM_NTASKS_PER_NODE` if it counts the tasks of each node; inside of a
    step it may be about the step's nodes only. One task is assumed without either.

    Raises:
        ValueError: the variables contradict each other.
    """
    names = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not names or "SLURM_JOB_ID" not in environ:
        return None
    nodes = expand_node_list(names)
    same = environ.get("SLURM_NTASKS_PER_NODE")
    tasks = environ.get("SLURM_TASKS_PER_NODE") or same or "1"
    if same and len(_list_counts(tasks)) != len(nodes):
        tasks = same
    return list(zip(nodes, expand_task_counts(tasks, len(nodes)), strict=True))


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process, rather than a batch script that merely sees the job's variables."""
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEP_NUM_TASKS" in environ
    return "SLURM_PROCID" in environ and (in_step or environ.get("ENVIRONMENT") != "BATCH")


def _expand_piece(piece: re.Match[str], text: str) -> Iterator[str]:
    if piece[2] is not None:
        yield piece[2]
        return
    for part in piece[1].split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of nodes: {part!r} is no range such as 01-04")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first > _MAX_NUM_NODES:
            raise ValueError(f"{text!r} is not a list of nodes: {part!r} is an impossible range")
        yield from (str(number).zfill(len(match[1])) for number in range(first, last + 1))
