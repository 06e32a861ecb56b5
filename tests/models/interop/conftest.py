"""One reader process for the tests of a worker: each start imports torch."""

from pathlib import Path

import pytest

from datasvc.child_process import ChildProcess
from datasvc.models.interop import torch_reader

# Less than the default, so that files that fill it do so soon.
MEMORY_BYTES = 128 << 20


def size_bytes(child):
    return int(Path(f"/proc/{child.process.pid}/statm").read_text().split()[0]) << 12


@pytest.fixture(scope="session")
def readers():
    """Running processes and their sizes after the start, by their first message."""
    running = {}
    yield running
    for child, _ in running.values():
        child.close()


@pytest.fixture(autouse=True)
def shared_reader(readers, monkeypatch):
    """Give every reader the same process, with its limits; replace one that ended or that a file has enlarged."""

    class Shared:
        def __init__(self, module, message, *, answers):
            message = (MEMORY_BYTES, message[1])
            child, size = readers.get(message, (None, 0))
            if child is not None and (child.process.poll() is not None or size_bytes(child) > size + (32 << 20)):
                child.close()
                child = None
            if child is None:
                child = ChildProcess(module, message, answers=answers)
                child.send(torch_reader.ReadRequest("state", torch_reader.Extent(Path("/"), 0, 0, "")))
                assert "error" in child.read_line()
                readers[message] = (child, size_bytes(child))
            self.send, self.process = child.send, child.process

        def close(self):
            """The session closes it."""

    monkeypatch.setattr(torch_reader, "ChildProcess", Shared)
    monkeypatch.setattr(torch_reader, "MAX_NODES", 10_000)
