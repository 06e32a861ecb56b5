"""What ``datasvc.trainer.run`` asks for before it starts anything, and where it listens."""

import contextlib
import inspect
import os
import sys
from pathlib import Path

import cloudpickle
import pytest

from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.function import run, worker

LISTENING = "0A"


def list_addresses(pid):
    """The IPv4 addresses, in hexadecimal, and ports at which a process listens."""
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
        except OSError:
            continue
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {words[1] for words in lines if words[3] == LISTENING and words[9] in sockets}


def list_addresses_of_launcher():
    return list_addresses(os.getppid())


@pytest.mark.parametrize("elastic", [{}, {"min_num_proc": 1}])
def test_only_this_machine_is_listened_to_if_no_other_has_ranks(elastic):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    before = list_addresses(os.getpid())
    (during,) = run(list_addresses_of_launcher, num_proc=1, **elastic)
    added = set(during) - before
    assert len(added) == 2  # The store, and what hands over the function.
    assert {address.split(":")[0] for address in added} == {"0100007F"}


@pytest.mark.parametrize("name", ["reset_limit", "cooldown_range"])
def test_an_argument_of_elastic_jobs_alone_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is for elastic jobs"):
        run(len, ((),), **{name: (1, 2) if name == "cooldown_range" else 3})


@pytest.fixture
def jobs(monkeypatch):
    """What would be started, in place of starting it."""
    started = []
    monkeypatch.setattr(
        "datasvc.trainer.function.job._run", lambda job, elastic, *_: started.append((job, elastic)) or []
    )
    return started


def test_older_names_of_arguments_mean_the_newer_ones(jobs):
    run(len, np=3, min_np=2, max_np=4, network_interface="eth0,eth1")
    run(len, num_proc=3, min_num_proc=2, max_num_proc=4, network_interfaces=["eth0", "eth1"])
    assert jobs[0] == jobs[1]
    job, elastic = jobs[0]
    assert (job.num_ranks, elastic.min_num_ranks, elastic.max_num_ranks) == (3, 2, 4)
    assert job.remote.network_interfaces == ("eth0", "eth1")


def test_arguments_come_in_horovod_s_order():
    assert list(inspect.signature(run).parameters)[:28] == [
        "func",
        "args",
        "kwargs",
        "num_proc",
        "min_num_proc",
        "max_num_proc",
        "slots",
        "reset_limit",
        "cooldown_range",
        "hosts",
        "hostfile",
        "host_discovery_script",
        "start_timeout",
        "ssh_port",
        "ssh_identity_file",
        "disable_cache",
        "output_filename",
        "verbose",
        "use_gloo",
        "use_mpi",
        "mpi_args",
        "network_interface",
        "network_interfaces",
        "executable",
        "np",
        "min_np",
        "max_np",
        "env",
    ]


@pytest.mark.parametrize("asked", [{"use_mpi": True}, {"mpi_args": "--bind-to core"}])
def test_who_asks_for_mpi_is_told_that_it_is_gloo(jobs, asked):
    with pytest.warns(UserWarning, match="there is no MPI; the ranks communicate over gloo") as caught:
        run(len, **asked)
    assert caught[0].filename == __file__
    assert len(jobs) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_np": 2, "min_num_proc": 3}, "min_np=2 is the older name of min_num_proc=3"),
        ({"network_interface": "a", "network_interfaces": ["b"]}, "network_interface='a' is the older name of"),
        ({"use_gloo": True, "use_mpi": True}, "give one; both use gloo here"),
        ({"start_timeout": 0}, "start_timeout is 0; expected seconds above 0"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(jobs, arguments, message):
    with pytest.raises(ValueError, match=message):
        run(len, **arguments)
    assert not jobs


@pytest.mark.parametrize("name", ["num_proc", "np", "min_num_proc", "max_np", "slots"])
@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_numbers_of_ranks_below_one_are_refused(jobs, name, count):
    with pytest.raises(ValueError, match=rf" is {count}; expected a whole number of at least 1"):
        run(len, **{name: count})
    assert not jobs


def test_an_argument_that_nobody_has_is_refused(jobs):
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        run(len, speed=3)


def leave_on_rank_0():
    if os.environ["RANK"] == "0":
        sys.exit(0)
    return 5


def test_a_rank_of_an_elastic_job_that_exits_instead_of_returning_is_named_although_others_returned(monkeypatch):
    def run_job(job, *_):
        for rank in ("0", "1"):
            place = {"RANK": rank, "MASTER_ADDR": "127.0.0.1", "TRAINER_ELASTIC_WORKER": f"localhost:{rank}:{rank}"}
            with monkeypatch.context() as context:
                for name, value in {**place, **job.variables}.items():
                    context.setenv(name, value)
                with contextlib.suppress(SystemExit):
                    worker.main()

    monkeypatch.setattr("datasvc.trainer.function.job.run_job", run_job)
    with pytest.raises(HorovodInternalError, match="rank 0 ended with status 0 before the function returned"):
        run(leave_on_rank_0, num_proc=2, min_num_proc=1)
