"""Other processes that use a cache in tests: holders, fetchers that die, forked children; and what is on the disk."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support import warm_python

ROOT = Path(__file__).parents[2]

HOLDER = """
import sys
from datasvc.cache import Cache
from datasvc.repository import ObjectInfo, Repository
cache, repository = Cache(sys.argv[1]), Repository.open(sys.argv[2])
for digest in sys.argv[3:]:
    cache.acquire(ObjectInfo(digest, 4096), repository)
print("holding", flush=True)
sys.stdin.read()
"""

# Dies at the first byte that would come from the origin.
DYING_FETCHER = """
import os, signal, sys
from datasvc.cache import Cache
from datasvc.repository import ObjectInfo, Repository
repository = Repository.open(sys.argv[2])
repository.objects.read_range = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Cache(sys.argv[1]).acquire(ObjectInfo(sys.argv[3], 4096), repository)
"""


def start_python(code, *arguments):
    """Start Python code that talks by its standard streams."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def run_python(code, *arguments):
    """Run Python code to its end; returns its exit status."""
    words = [warm_python.command(), "-c", code, *map(str, arguments)]
    return subprocess.run(words, cwd=ROOT, check=False).returncode


def hold_in_a_process(cache, repository, infos):
    """Return a process that holds objects until its standard input ends."""
    process = start_python(HOLDER, cache.folder, repository.url, *(info.digest for info in infos))
    assert process.stdout.readline() == "holding\n"
    return process


def die_while_fetching(cache, repository, info):
    """Let a process reserve an object, and die while it fetches."""
    assert run_python(DYING_FETCHER, cache.folder, repository.url, info.digest) == -9


def kill(process):
    """Kill a process with SIGKILL, and wait for its end."""
    process.kill()
    process.communicate()


def in_a_fork(work):
    """Return what `work` returns in a forked child, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(work()).encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        return answer.read()


def disk_bytes(folder):
    """Return what objects take of the disk, on their way, resident or in quarantine: blocks, each file once."""
    files = {}
    for name in ("objects", "incoming", "quarantine"):
        for path in (Path(folder) / name).rglob("*"):
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            if path.is_file() and path.suffix != ".parts":
                files[found.st_ino] = found.st_blocks * 512
    return sum(files.values())


def object_path(cache, info):
    """Return where an object lies in a cache."""
    return cache.folder / "objects" / info.digest[:2] / info.digest


def are_there(cache, infos):
    """Return which objects lie in a cache."""
    return [object_path(cache, info).exists() for info in infos]
