"""Lists of nodes and of tasks, as Slurm writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.env.foreign_launchers import expand_node_list, expand_task_counts, is_task, read_nodes

PREFIXES = st.from_regex(r"[a-z][a-z0-9.\-]{0,6}[a-z]", fullmatch=True)


@st.composite
def ranges(draw):
    """A list in brackets with the numbers that it means."""
    width = draw(st.integers(1, 4))
    parts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 10**width - 1))
        last = draw(st.integers(first, min(first + 5, 10**width - 1)))
        written = [f"{number:0{width}}" for number in range(first, last + 1)]
        parts.append(written[0] if len(written) == 1 else f"{written[0]}-{written[-1]}")
        numbers += written
    return f"[{','.join(parts)}]", numbers


@st.composite
def node_lists(draw):
    """A list of nodes as Slurm writes it, with the names that it means."""
    parts, names = [], []
    for _ in range(draw(st.integers(1, 3))):
        prefix = draw(PREFIXES)
        text, numbers = draw(st.one_of(st.just(("", [""])), ranges()))
        parts.append(prefix + text)
        names += [prefix + number for number in numbers]
    return ",".join(parts), names


@given(node_lists())
def test_a_list_is_expanded_to_its_names_in_order(case):
    text, names = case
    assert expand_node_list(text) == names


@given(ranges(), ranges())
def test_two_ranges_in_a_name_are_multiplied_the_last_one_fastest(racks, nodes):
    names = [f"r{rack}n{node}x" for rack in racks[1] for node in nodes[1]]
    assert expand_node_list(f"r{racks[0]}n{nodes[0]}x") == names


@given(st.text(alphabet="ab01[],- ", max_size=12))
def test_any_text_is_a_list_of_names_or_an_error(text):
    try:
        names = expand_node_list(text)
    except ValueError:
        return
    assert names
    assert all(name and not set(name) & set("[], ") for name in names)


@pytest.mark.parametrize(
    "text", ["", "a[", "a[1-", "a[2-1]", "a[x]", "a,,b", ",a", "a,", "a[]", "a[0-99999999999]", "a b"]
)
def test_what_is_no_list_is_refused(text):
    with pytest.raises(ValueError, match="is not a list of nodes"):
        expand_node_list(text)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 5)), min_size=1, max_size=4))
def test_task_counts_are_repeated_as_written(runs):
    text = ",".join(f"{count}(x{repeat})" if repeat > 1 else str(count) for count, repeat in runs)
    counts = [count for count, repeat in runs for _ in range(repeat)]
    assert expand_task_counts(text, len(counts)) == counts


def test_one_count_is_that_of_every_node_and_others_must_fit():
    assert expand_task_counts("4", 3) == [4, 4, 4]
    with pytest.raises(ValueError, match="has the tasks of 2 nodes, but the allocation has 3"):
        expand_task_counts("4,2", 3)
    with pytest.raises(ValueError, match="not a list of tasks"):
        expand_task_counts("many", 3)


def test_the_nodes_of_an_allocation_have_the_requested_tasks():
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1"}
    assert read_nodes(environ) == [("n1", 2), ("n2", 1)]
    # --nodes=2 --ntasks=5 --ntasks-per-node=4
    uneven = {**environ, "SLURM_TASKS_PER_NODE": "4,1", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NTASKS": "5"}
    assert read_nodes(uneven) == [("n1", 4), ("n2", 1)]
    assert read_nodes({}) is None


def test_the_tasks_of_a_step_on_some_nodes_are_not_those_of_the_allocation():
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "8"}
    assert read_nodes(environ) == [("n1", 8), ("n2", 8)]
    assert read_nodes({**environ, "SLURM_TASKS_PER_NODE": "1"}) == [("n1", 8), ("n2", 8)]


def test_a_batch_script_is_no_task_although_it_has_a_rank():
    assert not is_task({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "ENVIRONMENT": "BATCH"})
    assert is_task({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "ENVIRONMENT": "BATCH", "SLURM_STEP_ID": "0"})
    assert not is_task({"SLURM_NTASKS": "4"})
