"""What every loader refuses, whatever it decodes."""

import os
import subprocess
import sys
import threading

import pytest

from datasvc.errors import ConfigError
from datasvc.loaders import DecodeConfig, ImageLoader
from tests.support.gate import Gate


@pytest.fixture
def loader(digits):
    with ImageLoader(
        digits["val"], batch_size=8, training=True, size=32, decode=DecodeConfig(num_threads=1)
    ) as loader:
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
    gate = Gate()
    monkeypatch.setattr(loader._batches, "retire", gate.before(loader._batches.retire))
    thread = threading.Thread(target=lambda: next(iter(loader)))
    thread.start()
    gate.begun.wait()
    with pytest.raises(ConfigError, match="another thread"):
        next(iter(loader))
    with pytest.raises(ConfigError, match="another thread"):
        loader.close()
    gate.open()
    thread.join()
    monkeypatch.undo()
    assert next(iter(loader)).positions.tolist() == list(range(8, 16))


ENDING = """
import atexit, concurrent.futures.thread, sys, threading
ending = threading.Event()
threading._register_atexit(ending.set)  # after what loaders register, and before threads are waited for
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from datasvc.loaders import AugmentConfig, DecodeConfig, ImageLoader

seen = []

def transform(image, generator):
    seen.append(1)
    if len(seen) == 9:  # the first batch, and one more
        decoding.set()
        ending.wait()
    return image

decoding = threading.Event()
sys.excepthook = lambda *_: None
split = open_dataset(Repository.open(sys.argv[1]), "digits@1")["val"]
augment, decode = AugmentConfig(transform=transform), DecodeConfig(num_threads=1, prefetch=4)
loader = ImageLoader(split, batch_size=8, training=True, size=32, augment=augment, decode=decode)
batches = iter(loader)
next(batches)
decoding.wait()
atexit.register(lambda: print(len(seen)))
raise KeyboardInterrupt
"""


@pytest.mark.slow
def test_a_program_that_ends_without_closing_decodes_nothing_more(digits):
    command = [sys.executable, "-c", ENDING, digits["val"].repository.url]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout == "9\n", ended.stderr
