"""Host discovery with real scripts, and what the environment says about waiting."""

import os
import queue
import subprocess
import sys

import pytest

from datasvc.trainer.elastic.driver.driver import Discovery, DiscoveryError, run_discovery
from datasvc.trainer.elastic.driver.limits import plan_limits, read_discovery_interval_s
from datasvc.trainer.launch.ranks.job import ElasticOptions, Host, LaunchJob


def discover(script, **options):
    return run_discovery(script, **{"default_slots": 1, **options})


def test_lines_are_hosts_with_or_without_slots():
    assert discover("printf 'a:2\\nb\\n'", default_slots=4) == (Host("a", 2), Host("b", 4))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no luck >&2; exit 3", "exited with status 3: no luck"),
        ("exit 1", "exited with status 1: it printed no error"),
        ("echo a b c", "is not a list of hosts"),
        ("true", "it contains no hosts"),
        ("/no/such/script", "exited with status 127"),
    ],
)
def test_a_script_that_fails_or_prints_no_hosts_is_an_error(script, words):
    with pytest.raises(DiscoveryError, match=words):
        discover(script)


def test_a_script_that_hangs_is_ended_with_its_children(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    # The child holds the other end, which is closed when it is gone.
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(DiscoveryError, match=r"took longer than 0\.5 s"):
        discover(f"sleep 1000 >{tmp_path}/fifo & wait", timeout_s=0.5)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_changes_are_reported_once_and_so_are_failures(tmp_path):
    events = queue.SimpleQueue()
    hosts = tmp_path / "hosts"
    hosts.write_text("a:1\n")

    def replace(text):
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(hosts)

    with Discovery(
        f"cat {hosts}", default_slots=1, interval_s=0.01, on_hosts=events.put, on_error=events.put
    ) as discovery:
        assert events.get(timeout=20) == (Host("a", 1),)
        hosts.unlink()
        assert "exited with status 1" in events.get(timeout=20)
        replace("a:1\n")
        replace("a:1\nb:2\n")
        assert events.get(timeout=20) == (Host("a", 1), Host("b", 2))
    discovery._thread.join(20)
    assert events.empty()


def test_times_come_from_the_command_line_or_else_from_the_environment():
    job, options = LaunchJob(command=["x"], num_ranks=2), ElasticOptions(min_num_ranks=1)
    assert plan_limits(job, options, {}).elastic_timeout_s == 600.0
    assert plan_limits(job, options, {"HVD_ELASTIC_TIMEOUT": "7"}).elastic_timeout_s == 7.0
    both = {"HVD_ELASTIC_TIMEOUT": "7", "HOROVOD_ELASTIC_TIMEOUT": "8"}
    assert plan_limits(job, options, both).elastic_timeout_s == 8.0
    assert plan_limits(job, ElasticOptions(elastic_timeout_s=9.0), both).elastic_timeout_s == 9.0
    with pytest.raises(ValueError, match="HOROVOD_ELASTIC_TIMEOUT must be a number of seconds above 0, not 'soon'"):
        plan_limits(job, options, {"HOROVOD_ELASTIC_TIMEOUT": "soon"})
    assert plan_limits(LaunchJob(command=["x"], num_ranks=2, start_timeout_s=4.0), options, {}).start_timeout_s == 4.0
    assert read_discovery_interval_s({}) == 1.0
    assert read_discovery_interval_s({"HVD_DISCOVERY_INTERVAL": "0.5"}) == 0.5
    for value in ("soon", "0", "-1", "inf"):
        with pytest.raises(ValueError, match="HVD_DISCOVERY_INTERVAL must be a number of seconds above 0"):
            read_discovery_interval_s({"HVD_DISCOVERY_INTERVAL": value})


def test_the_limit_for_a_rank_that_hangs_is_not_the_timeout_of_its_collectives():
    options = ElasticOptions(min_num_ranks=1)
    for seconds in ("3", "7200"):
        job = LaunchJob(command=["x"], num_ranks=2, variables={"HOROVOD_GLOO_TIMEOUT_SECONDS": seconds})
        assert plan_limits(job, options, {}).hang_timeout_s == 600.0
    assert plan_limits(job, options, {"HVD_ELASTIC_HANG_TIMEOUT": "3"}).hang_timeout_s == 3.0
    with pytest.raises(ValueError, match="HVD_ELASTIC_HANG_TIMEOUT must be a number of seconds above 0, not '0'"):
        plan_limits(job, options, {"HVD_ELASTIC_HANG_TIMEOUT": "0"})


def test_the_launchers_side_starts_without_torch():
    code = "import sys, datasvc.trainer.elastic.driver.driver; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
