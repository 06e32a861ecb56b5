import os
import signal
import subprocess
import sys

import pytest

from datasvc.cache.catalogue.lease import Lease, is_held, sweep
from datasvc.durable import TEMPORARY_PREFIX
from datasvc.errors import ConfigError


def test_a_lease_is_held_until_closed(tmp_path):
    lease = Lease(tmp_path)
    assert is_held(tmp_path, lease.id)
    lease.close()
    lease.close()
    assert not is_held(tmp_path, lease.id)
    assert os.listdir(tmp_path) == []


def hold_in_a_process(folder):
    code = "import sys, pathlib; from datasvc.cache.catalogue.lease import Lease\n"
    code += "lease = Lease(pathlib.Path(sys.argv[1])); print(lease.id, flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, folder], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


def test_the_kernel_drops_the_lease_of_a_killed_process(tmp_path):
    process, lease_id = hold_in_a_process(tmp_path)
    assert is_held(tmp_path, lease_id)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not is_held(tmp_path, lease_id)


def test_a_sweep_removes_dead_leases_and_no_living_one(tmp_path):
    process, dead = hold_in_a_process(tmp_path)
    process.kill()
    process.communicate()
    lease = Lease(tmp_path)
    sweep(tmp_path)
    assert os.listdir(tmp_path) == [lease.id] != [dead]
    lease.close()


def test_a_folder_that_cannot_hold_leases_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot lock a file in"):
        Lease(tmp_path / "missing")


def test_what_a_process_killed_while_it_took_a_lease_left_is_swept(tmp_path):
    (tmp_path / f"{TEMPORARY_PREFIX}7-abc").touch()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []
