import socket

import pytest

from datasvc.trainer.elastic.driver.actions import Start, plan_worker_start
from datasvc.trainer.env.environment import RankPlacement
from datasvc.trainer.launch.ranks.job import LaunchJob, RemoteSettings
from datasvc.trainer.launch.ranks.remote_guard import find_interface
from datasvc.trainer.launch.ranks.store import list_addresses, open_listener

ENVIRON = {"PATH": "/bin", "RANK": "3", "GROUP_RANK": "7"}


@pytest.fixture
def plan():
    """Plans the first worker of a host."""
    with open_listener(1, for_other_hosts=True) as listener:

        def plan(host, *, environ=ENVIRON, other_hosts=(), **settings):
            job = LaunchJob(command=["true"], num_ranks=1, remote=RemoteSettings(**settings))
            start = Start(f"{host}:0:4", host, RankPlacement(1, 3, 0, 2, 1, 2))
            return plan_worker_start(start, job, environ, listener, num_neighbours=2, other_hosts=other_hosts)

        yield plan


@pytest.fixture
def way_out():
    """The interface by which other hosts reach this one."""
    name = find_interface(list_addresses([], [])[0]) if list_addresses([], []) else None
    if name is None:
        pytest.skip("this machine has the loopback interface only")
    return name


def test_a_worker_here_talks_over_the_interface_that_hosts_elsewhere_reach(plan, way_out):
    assert plan("localhost").environ["GLOO_SOCKET_IFNAME"] == way_out


def test_the_users_interface_stands(plan):
    assert plan("localhost", environ={"GLOO_SOCKET_IFNAME": "mine"}).environ["GLOO_SOCKET_IFNAME"] == "mine"


def test_workers_that_are_all_here_need_no_interface(plan):
    assert "GLOO_SOCKET_IFNAME" not in plan("localhost", other_hosts=None).environ


def test_a_worker_elsewhere_shares_the_processors_with_those_beside_it(plan):
    start = plan("node7", other_hosts=["node7"])
    assert start.num_neighbours == 2
    assert "OMP_NUM_THREADS" not in start.environ


@pytest.mark.parametrize("host", ["localhost", "node7"])
def test_a_worker_sees_the_place_that_it_will_have_and_none_of_another_launcher(plan, host):
    environ = plan(host, other_hosts=["node7"]).environ
    place = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    place |= {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "2"}
    place |= {"HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_HOSTNAME": host}
    assert {name: environ[name] for name in place} == place
    assert "GROUP_RANK" not in environ


@pytest.mark.parametrize("host", ["localhost", "node7"])
def test_horovods_variable_for_the_interface_is_used(plan, host):
    environ = plan(host, environ={"HOROVOD_GLOO_IFACE": "mine"}, other_hosts=["node7"]).environ
    assert environ["GLOO_SOCKET_IFNAME"] == "mine"


@pytest.mark.parametrize("host", ["localhost", "node7"])
def test_chosen_interfaces_are_for_all_workers(plan, host):
    _, name = socket.if_nameindex()[0]
    environ = plan(host, network_interfaces=(name,), other_hosts=["node7"]).environ
    assert (environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"]) == (name, name)
