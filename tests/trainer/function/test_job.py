"""What ``trainer.run`` asks for before it starts anything, and where it listens."""

import os
import sys
from pathlib import Path

import pytest

from trainer.function import run

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
    cloudpickle = pytest.importorskip("cloudpickle")
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
