"""Hosts from the command line, from files, from Slurm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.launch.ranks.hosts import parse_host_file, parse_hosts, read_allocation
from datasvc.trainer.launch.ranks.job import Host

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9.\-]{0,8}[a-z0-9])?", fullmatch=True)
HOSTS = st.lists(st.builds(Host, NAMES, st.integers(1, 99)), min_size=1, max_size=5, unique_by=lambda host: host.name)


@given(HOSTS)
def test_hosts_are_read_as_they_are_written(hosts):
    assert parse_hosts(",".join(f"{host.name}:{host.num_slots}" for host in hosts)) == tuple(hosts)


@given(
    HOSTS,
    st.sampled_from(["{0.name} slots={0.num_slots}", "{0.name}:{0.num_slots}", " {0.name}\tslots={0.num_slots} # x"]),
)
def test_the_lines_of_a_host_file_have_open_mpis_forms(hosts, form):
    lines = ["# my hosts", "", *(form.format(host) for host in hosts)]
    assert parse_host_file("\n".join(lines)) == tuple(hosts)


@given(HOSTS)
def test_a_host_that_comes_twice_adds_its_slots(hosts):
    text = ",".join(f"{host.name}:{host.num_slots}" for host in hosts + hosts)
    assert parse_hosts(text) == tuple(Host(host.name, 2 * host.num_slots) for host in hosts)


def test_a_host_without_slots_has_one_or_the_default():
    assert parse_hosts("a,b:3") == (Host("a", 1), Host("b", 3))
    assert parse_host_file("a\nb max_slots=9\n", default_slots=4) == (Host("a", 4), Host("b", 4))


def test_users_and_addresses_are_kept():
    assert parse_hosts("me@a:2,[fe80::1]:3,10.0.0.7") == (Host("me@a", 2), Host("fe80::1", 3), Host("10.0.0.7", 1))


@pytest.mark.parametrize("text", ["", "a,", "a:x", "a:0", "-oProxyCommand=x", "a b", "a:1:2", "a;rm"])
def test_what_is_no_host_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a host|has no slots"):
        parse_hosts(text)


def test_the_line_of_a_host_file_that_is_wrong_is_named():
    with pytest.raises(ValueError, match="line 2: 'cores=3' is not of the form slots=N"):
        parse_host_file("a slots=2\nb cores=3")
    with pytest.raises(ValueError, match="no hosts"):
        parse_host_file("# nothing\n")


SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}


def test_an_allocation_gives_its_nodes_and_tasks():
    assert read_allocation(SLURM) == (Host("n1", 2), Host("n2", 2))
    assert read_allocation(SLURM, slots_per_host=8) == (Host("n1", 8), Host("n2", 8))
    assert read_allocation({}) == ()


def test_several_launchers_started_by_srun_are_refused():
    with pytest.raises(ValueError, match="srun has started 4 launchers"):
        read_allocation({**SLURM, "SLURM_STEP_NUM_TASKS": "4"})
