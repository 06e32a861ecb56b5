"""Elastic jobs whose hosts are reached through real sshds, and are lost with them."""

import re

import pytest

from tests.distributed.elastic_jobs import SAME_SIZE, ListedHosts, check_alike, check_equal
from tests.distributed.ssh_hosts import SshHosts, needs_ssh
from tests.support.ports import reserved_ports

SHRINKING = ("--min-num-proc", "1")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_ssh]


@pytest.fixture
def hosts(launcher, tmp_path):
    launcher.environ["HVD_DISCOVERY_INTERVAL"] = "0.1"
    with reserved_ports(1) as (port,):
        hosts = SshHosts(tmp_path, launcher.environ, port, "node7", "node8", "node9")
        yield hosts
        hosts.close()


@pytest.fixture
def listed(tmp_path):
    return ListedHosts(tmp_path, "node7:1", "node8:1")


def pids_at_the_start(output):
    """Process numbers by rank, of the first round."""
    return [int(pid) for _, pid in sorted(re.findall(r"in round 1 as rank (\d) of \d in process (\d+)", output))]


def test_a_new_host_joins_and_no_process_starts_again(elastic, hosts, listed, undisturbed):
    job = elastic.start(2, (*SHRINKING, *hosts.options, *listed.options), sizes={"5": 3})
    job.read_until("committed 5 of 2")
    listed.set("node7:1", "node8:1", "node9:1")
    result = job.result()
    check_alike(result, undisturbed)
    assert result["sizes"] == [2] * 5 + [3] * 15
    ends = re.findall(r"ends after (\d) resets as rank (\d) of 3 in process (\d+)", result["output"])
    old = [int(pid) for num_resets, _, pid in sorted(ends, key=lambda end: end[1]) if num_resets == "1"]
    assert old == pids_at_the_start(result["output"])


def test_a_rank_that_is_killed_behind_ssh_is_replaced_there_and_nothing_differs(elastic, hosts, listed, undisturbed):
    options = (*SAME_SIZE, *hosts.options, *listed.options)
    result = elastic.result(2, options, faults={"1": ["backward", 7]})
    check_equal(result, undisturbed)
    (killed,) = re.findall(r"worker (node\d):0:1 was killed by SIGKILL; host \1 gets no new ranks", result["errors"])
    assert f"[{killed}:0] ends after 0 resets" in result["output"]


def test_when_the_sshd_of_rank_0_is_lost_the_others_continue_and_the_host_is_named(
    elastic, hosts, listed, undisturbed, has_ended
):
    job = elastic.start(2, (*SHRINKING, *hosts.options, *listed.options), sizes={"5": 1})
    job.read_until("committed 5 of 2")
    lost, going_on = pids_at_the_start(job.output)
    hosts.cut("node7")
    result = job.result()
    check_alike(result, undisturbed)
    assert result["sizes"] == [2] * 5 + [1] * 15
    assert result["pid"] == going_on
    assert (
        "rank 0, worker node7:0:0 was lost: ssh to node7 exited with status 255; "
        "host node7 gets no new ranks, the others continue"
    ) in result["errors"]
    assert has_ended(lost)


def test_a_host_is_tried_again_until_its_sshd_is_back(elastic, hosts, listed, undisturbed):
    options = (*SHRINKING, "--blacklist-cooldown-range", "0.1", "0.1", *hosts.options, *listed.options)
    job = elastic.start(2, options, sizes={"5": 1, "9": 2})
    job.read_until("committed 5 of 2")
    hosts.cut("node8")
    job.hear("worker node8:0:2 was not started: ssh to node8 exited with status 255; host node8 gets no new ranks")
    job.read_until("committed 9 of 1")
    hosts.open("node8")
    result = job.result()
    check_alike(result, undisturbed)
    assert result["sizes"] == [2] * 5 + [1] * 4 + [2] * 11
