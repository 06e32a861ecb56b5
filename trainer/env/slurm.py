"""Pure functions that parse Slurm's variables: the nodes of an allocation, and the number of tasks on each node."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

# A short text such as a[0-99999]b[0-99999] names billions of nodes, so this limit protects the memory.
_MAX_NUM_NODES = 1 << 20
# A name consists of text and ranges in brackets. A comma outside brackets separates two names.
_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
# A part of a name: the text inside brackets (group 1), or other text (group 2).
_NAME_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
# A number of tasks, and the number of consecutive nodes that have as many, as in 4(x2).
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_node_list(text: str) -> list[str]:
    """Return the names in a list such as `node[01-03,07],login`, in the order of the list.

    Raises:
        ValueError: `text` is not a list of this form, or names too many nodes.
    """
    names = []
    position = 0
    for match in _NAME.finditer(text):
        # One comma separates two names. Any other text between them ends the loop, and is an error below.
        separator = "" if position == 0 else ","
        if text[position : match.start()] != separator:
            break
        position = match.end()
        # The names are all combinations of the choices of each part: a part without brackets has one choice.
        choices = [list(_expand_part(part, text)) for part in _NAME_PART.finditer(match[0])]
        names += ["".join(parts) for parts in itertools.islice(itertools.product(*choices), _MAX_NUM_NODES + 1)]
        if len(names) > _MAX_NUM_NODES:
            raise ValueError(f"{text!r} names more than {_MAX_NUM_NODES} nodes")
    if position != len(text) or not names:
        raise ValueError(f"{text!r} is not a list of nodes such as node[01-03,07],login")
    return names


def expand_task_counts(text: str, num_nodes: int) -> list[int]:
    """Return the number of tasks on each node, from a list such as `4(x2),3`, or from `4` for all nodes.

    Raises:
        ValueError: `text` is not a list of this form, or is for another number of nodes.
    """
    counts = _list_counts(text)
    if len(counts) == 1:
        return counts * num_nodes
    if len(counts) != num_nodes:
        raise ValueError(f"{text!r} has the tasks of {len(counts)} nodes, but the allocation has {num_nodes}")
    return counts


def _list_counts(text: str) -> list[int]:
    """Return the numbers in a list of tasks per node; `4(x2)` gives 4 twice. For errors, see `expand_task_counts`."""
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
    """Return the nodes of the Slurm allocation, with the number of tasks on each; None without an allocation.

    `SLURM_TASKS_PER_NODE` takes precedence over `SLURM_NTASKS_PER_NODE`, which is the same number for all nodes. But
    inside a step, the former may cover only the nodes of the step; then the latter is used, if it is set. If neither
    is set, each node has one task.

    Raises:
        ValueError: the variables contradict each other.
    """
    names = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not names or "SLURM_JOB_ID" not in environ:
        return None
    nodes = expand_node_list(names)
    uniform_count = environ.get("SLURM_NTASKS_PER_NODE")
    tasks = environ.get("SLURM_TASKS_PER_NODE") or uniform_count or "1"
    if uniform_count and len(_list_counts(tasks)) != len(nodes):
        tasks = uniform_count
    return list(zip(nodes, expand_task_counts(tasks, len(nodes)), strict=True))


def is_task(environ: Mapping[str, str]) -> bool:
    """Return whether `srun` started this process."""
    # A batch script has SLURM_PROCID too, but is not a task of `srun`.
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEP_NUM_TASKS" in environ
    return "SLURM_PROCID" in environ and (in_step or environ.get("ENVIRONMENT") != "BATCH")


def _expand_part(part: re.Match[str], text: str) -> Iterator[str]:
    """Yield the texts that a match of `_NAME_PART` stands for; `text` is the whole list, for error messages."""
    if part[2] is not None:
        yield part[2]
        return
    for range_text in part[1].split(","):
        match = _RANGE.fullmatch(range_text)
        if match is None:
            raise ValueError(f"{text!r} is not a list of nodes: {range_text!r} is not a range such as 01-04")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first > _MAX_NUM_NODES:
            raise ValueError(f"{text!r} is not a list of nodes: the range {range_text!r} is empty or too large")
        # Numbers keep the width of the first one: 01-03 is 01, 02, 03.
        yield from (str(number).zfill(len(match[1])) for number in range(first, last + 1))
