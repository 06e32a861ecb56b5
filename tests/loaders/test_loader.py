"""What every loader refuses, whatever it decodes."""

import os
import threading

import pytest

from datasvc.errors import ConfigError
from loaders import ImageLoader


@pytest.fixture
def loader(digits):
    with ImageLoader(digits["val"], batch_size=8, training=True, size=32, num_threads=1) as loader:
        yield loader


def test_a_forked_child_is_refused_and_closes_nothing_of_its_parents(loader):
    batches = iter(loader)
    next(batches)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            said = ""
            next(iter(loader))
        except ConfigError as error:
            said = str(error)
        finally:
            loader.close()
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, encoding="utf-8") as answer:
        assert "before the fork" in answer.read()
    assert next(batches).positions.tolist() == list(range(8, 16))


def test_a_second_thread_is_refused(loader, monkeypatch):
    reading, going, real = threading.Event(), threading.Event(), loader._batches.retire

    def waiting(batch):
        reading.set()
        going.wait()
        real(batch)

    monkeypatch.setattr(loader._batches, "retire", waiting)
    thread = threading.Thread(target=lambda: next(iter(loader)))
    thread.start()
    reading.wait()
    with pytest.raises(ConfigError, match="another thread"):
        next(iter(loader))
    going.set()
    thread.join()
    monkeypatch.undo()
    assert next(iter(loader)).positions.tolist() == list(range(8, 16))
