import os
import subprocess
import sys
import threading

import pytest

from datasvc import durable


def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(tmp_path):
    path = tmp_path / "file"
    durable.write_file(path, b"old")
    with pytest.raises(RuntimeError), durable.replacing(path) as file:
        file.write(b"half of the new")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_of_many_racing_creators_one_wins_and_its_content_stays(tmp_path):
    path, winners = tmp_path / "file", []
    start = threading.Barrier(16)

    def create(number):
        start.wait()
        try:
            durable.create_file(path, str(number).encode())
            winners.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [str(number).encode() for number in winners] == [path.read_bytes()]
    assert os.listdir(tmp_path) == ["file"]


def test_a_writer_killed_before_the_rename_leaves_the_old_content(tmp_path):
    path = tmp_path / "file"
    durable.write_file(path, b"old")
    code = """
import os, pathlib, signal, sys
from datasvc import durable
with durable.replacing(pathlib.Path(sys.argv[1])) as file:
    file.write(b"new")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -9
    assert path.read_bytes() == b"old"
    left = [name for name in os.listdir(tmp_path) if name != "file"]
    assert all(name.startswith(durable.TEMPORARY_PREFIX) for name in left)


def test_folders_are_made_with_their_parents(tmp_path):
    durable.make_folder(tmp_path / "a" / "b")
    durable.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_creator_killed_before_the_link_leaves_only_a_name_that_readers_skip(tmp_path):
    code = """
import os, pathlib, signal, sys
from datasvc import durable
os.link = lambda *_names: os.kill(os.getpid(), signal.SIGKILL)
durable.create_file(pathlib.Path(sys.argv[1]), b"new")
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], check=False)
    assert done.returncode == -9
    (left,) = os.listdir(tmp_path)
    assert left.startswith(durable.TEMPORARY_PREFIX)


@pytest.mark.parametrize("name", ["a", "a.b", "x\\y", "a%2Fb", "\u00e4" * 127, "a" * 255, "a ", "\u3042"])
def test_a_plain_name_names_a_file_in_its_folder(tmp_path, name):
    assert durable.is_plain_name(name)
    (tmp_path / name).write_bytes(b"")
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "/a", "a/", "a\0b", "a\nb", "\x7f", "\x9b", ".a", "\ud800", "a" * 256, "\u00e4" * 128],
)
def test_no_other_name_is_plain(name):
    assert not durable.is_plain_name(name)
