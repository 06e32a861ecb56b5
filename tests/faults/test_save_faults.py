"""Saves that die at every one of their steps, on disks that fill, on ones that cannot be written, by wrong clocks.

The children are forked from one program, so that torch is loaded once; it checks the repository after each of them.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

import datasvc
from datasvc.models import model_log
from datasvc.repository.logs import log
from tests.support import warm_python

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, os, pathlib, resource, signal, sys
import torch
import datasvc
from datasvc.errors import DatasvcError
from datasvc.api.gc import gc_at
from datasvc.models import restore

torch.set_num_threads(1)
FOLDER = sys.argv[1]
MODES, POINTS = map(json.loads, sys.argv[2:4])


def state(step):
    # Thirteen objects of their own, one of small tensors; one tensor never changes.
    generator = torch.Generator().manual_seed(step)
    rows = {f"t{n}": torch.randn(20_000, generator=generator) for n in range(13)}
    return {**rows, "frozen": torch.full((20_000,), 7.0), "small": torch.tensor([float(step)]), "step": step}


def in_child(act):
    pid = os.fork()
    if not pid:
        try:
            act()
        except DatasvcError as error:
            pathlib.Path(FOLDER, "said").write_text(json.dumps([type(error).__name__, str(error)]))
            os._exit(3)
        except BaseException as error:
            sys.stderr.write(repr(error))
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(point):
    left = point

    def dying(real):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)
        return call

    for name in ("link", "fsync", "rename", "unlink", "mkdir", "utime"):
        setattr(os, name, dying(getattr(os, name)))


def save(step):
    with datasvc.open(REPO).models.manager("m") as model:
        model.save(state(step), step=step)


def files():
    root = pathlib.Path(REPO)
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def check(step, before):
    '''The newest version is whole, is that of `step` or the one after, and gc leaves nothing else.'''
    found = restore(repo.repository, "m")
    newest = found.state["step"]
    assert newest in (step, step + 1), newest
    expected = state(newest)
    assert all(torch.equal(found.state[name], value) for name, value in expected.items() if name != "step")
    gc_at(repo.repository, 1e12, grace_s=0, dry_run=False)
    if newest == step:
        assert files() == before, sorted(files() ^ before)
    assert not any(".tmp-" in path for path in files()), files()
    return newest


def hear():
    told = pathlib.Path(FOLDER, "said")
    said.append(json.loads(told.read_text()))
    told.unlink()


def dies():
    step, point, deaths = 1, 0, 0
    while True:
        point += 1
        if POINTS and point not in POINTS:
            if point > max(POINTS):
                break
            continue
        before = files()
        ended = in_child(lambda: (die_at(point), save(step + 1)))
        assert ended in (0, -9), ended
        step = check(step, before)
        deaths += ended == -9
        if ended == 0:
            break
    said.extend([deaths, point])


def full():
    '''The disk takes files up to a size: the objects fit, or not even they.'''
    for limit_bytes in (1 << 12, 1 << 16):
        def act():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
            save(2)
        before = files()
        assert in_child(act) == 3
        hear()
        assert check(1, before) == 1


def unwritable():
    root = pathlib.Path(REPO)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    def act():
        if os.geteuid() == 0:
            os.setuid(65534)  # nothing is unwritable for root
        save(2)
    assert in_child(act) == 3
    hear()
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    check(1, files())


for mode in MODES:
    REPO, said = f"{FOLDER}/{mode}", []
    repo = datasvc.open(REPO, create=True)
    save(1)
    {"dies": dies, "full": full, "unwritable": unwritable}[mode]()
    assert in_child(lambda: save(99)) == 0
    assert restore(repo.repository, "m").state["step"] == 99
    print(json.dumps([mode, said]), flush=True)
"""


def run(folder, modes, points=()):
    """Run the program; returns what was said in each mode."""
    words = [warm_python.command(), "-c", PROGRAM, str(folder), json.dumps(modes), json.dumps(list(points))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def said():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)  # whoever may not write to the repository may look, and say what happened
        yield {"folder": folder, **run(folder, ["dies", "full", "unwritable"], points=(1, 3, 10, 25, 40))}


@pytest.mark.slow
def test_a_background_save_killed_at_some_of_its_steps_leaves_the_last_version_and_gc_the_rest(said):
    deaths, _ = said["dies"]
    assert deaths == 5


@pytest.mark.slow
def test_a_background_save_killed_at_every_one_of_its_steps_leaves_the_last_version_and_gc_the_rest(tmp_path):
    deaths, points = run(tmp_path, ["dies"])["dies"]
    assert deaths >= 50
    assert points == deaths + 1, "and the last child came to its end"


@pytest.mark.parametrize(("mode", "kind"), [("full", "UnavailableError"), ("unwritable", "ConfigError")])
def test_a_full_or_unwritable_disk_is_an_error_and_leaves_the_last_version(said, mode, kind):
    assert said[mode]
    for found, text in said[mode]:
        assert found == kind
        assert text.startswith("the save of step 2 failed: ")
        assert said["folder"] in text


def test_a_clock_that_goes_backwards_changes_no_order(repository, monkeypatch):
    repo = datasvc.open(repository.url)
    with repo.models.manager("m") as model:
        for step, now in enumerate(
            ("2099-01-01T00:00:00+00:00", "1970-01-01T00:00:00+00:00", "2026-01-01T00:00:00+00:00")
        ):
            monkeypatch.setattr(log, "_now", lambda now=now: now)
            model.save({"w": torch.full((3,), float(step))}, step=step, wait=True)
    assert [version.entry["step"] for version in model_log(repository, "m")] == [0, 1, 2]
    assert [version.entry["parent"] for version in model_log(repository, "m")] == [None, "m@1", "m@2"]
    assert repo.models.restore("m").state["w"].tolist() == [2.0] * 3
    assert all(0 <= version.entry["duration"]["stall_s"] < 60 for version in model_log(repository, "m"))
