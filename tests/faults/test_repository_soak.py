"""Saves, ingests, deletions, retention, gc's and training side by side, while processes die and the power fails.

The wall clock of each process is moved by up to three days, alone or with all others; files are dated by the clock of
the store, which is right. test_moved_clocks.py has a store whose clock is moved.

At the end the books of all processes are compared with the repository. DATASVC_SOAK_S says for how long it runs,
DATASVC_SOAK_SEED what breaks; the seed is printed.
"""

import json
import os
import random
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import datasvc
from datasvc.api.gc import gc
from tests.faults.power_cut import cut_power
from tests.faults.soak_program import DATA, GRACE_S, KEPT_VERSIONS, MODEL, image_of, is_state
from tests.said import say

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOAK_S = float(os.environ.get("DATASVC_SOAK_S", "60"))
PROCESSES = {"saver": "save", "other-saver": "save", "ingester": "ingest", "deleter": "delete"}
PROCESSES |= {"sweeper": "sweep", "other-sweeper": "sweep", "trainer": "train"}
ENDS = {0, -signal.SIGKILL}
# Python ends itself by SIGINT after Ctrl-C; SIGTERM ends a process that does not handle it yet. A library in C++ that
# is just being imported aborts at Ctrl-C.
ENDS_WHEN_TOLD = {*ENDS, -signal.SIGINT, -signal.SIGTERM, -signal.SIGABRT}


class Soak:
    """The processes, which are started again when they end."""

    def __init__(self, folder, chance):
        self.repo = datasvc.open(str(folder / "repo"), create=True)
        self.done = Counter()
        self._folder, self._chance = folder, chance
        self._running = {}
        self._libraries = [folder / "power_cut.so", folder / "moved_clock.so"]
        self._log = folder / "unsynced"
        self._log.touch()
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler (cc) to build the library that notes what is not synced")
        for library in self._libraries:
            source = (HERE / library.name).with_suffix(".c")
            subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        for name in PROCESSES:
            (folder / name).mkdir()
            (folder / name / "clock").write_bytes(bytes(8))
            (folder / name / "book").touch()

    def start(self):
        """Start every process that does not run; one that ended must have ended by a signal or in order."""
        for name, work in PROCESSES.items():
            process = self._running.get(name)
            if process is not None and process.poll() is not None:
                self._check_end(name, process, ENDS)
                process = None
            if process is None:
                self._running[name] = self._start(name, work)

    def _start(self, name, work):
        folder = self._folder / name
        with (folder / "errors").open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.faults.soak_program", self.repo.repository.url, folder, work],
                cwd=ROOT,
                stderr=errors,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "OMP_NUM_THREADS": "1",
                    "LD_PRELOAD": ":".join(map(str, self._libraries)),
                    "MOVED_CLOCK": str(folder / "clock"),
                    "POWER_CUT_ROOT": str(self._folder / "repo"),
                    "POWER_CUT_LOG": str(self._log),
                },
            )

    def _check_end(self, name, process, ends):
        errors = (self._folder / name / "errors").read_text()[-3000:]
        assert process.wait() in ends, (name, process.returncode, errors)

    def end_one(self):
        """End any process in any way."""
        number = self._chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
        name = self._chance.choice([*PROCESSES])
        process = self._running[name]
        process.send_signal(number)
        process.wait(120)
        self._check_end(name, self._running.pop(name), ENDS_WHEN_TOLD)
        self.done[number.name] += 1

    def move_clocks(self):
        """Move the clocks of all machines by the same time, or each by another, or make them right again."""
        together = self._chance.choice([None, 0, self._chance.randint(-72, 72)])
        for name in PROCESSES:
            hours = self._chance.randint(-72, 72) if together is None else together
            # Written in place: running processes have mapped the file.
            with (self._folder / name / "clock").open("r+b") as file:
                file.write(struct.pack("=q", hours * 3600))
        self.done["clocks moved"] += 1

    def cut_power(self):
        """Kill all processes at once, and undo a part of what they have not synced."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        lost = cut_power(self._folder / "repo", self._log, self._chance)
        self.done.update({"power cuts": 1, "files that lost bytes": lost[0], "names lost": lost[1]})

    def wait_for_work(self):
        """Wait until there is a piece of each kind: on a busy machine none may take less than from kill to kill."""
        while not all(self.book(name)["done"] for name in ("saver", "ingester", "trainer")):
            self.start()
            time.sleep(0.2)

    def stop(self):
        """Let all processes end after their piece of work."""
        for process in self._running.values():
            process.terminate()
        for name, process in self._running.items():
            process.wait(120)
            self._check_end(name, process, ENDS_WHEN_TOLD)

    def kill(self):
        """End what still runs."""
        for process in self._running.values():
            process.kill()
            process.wait()

    def book(self, *names):
        """Return the lines of the books of these processes, by what they say."""
        lines = {"begun": [], "done": [], "refused": []}
        for name in names:
            for line in (self._folder / name / "book").read_text().splitlines():
                facts = json.loads(line)
                lines[facts.pop("what")].append(facts)
        return lines


def check_models(soak):
    """Every version that was reported is there and right, or was removed by retention."""
    saved = soak.book("saver", "other-saver")
    done = {line["version"]: line["step"] for line in saved["done"]}
    removed = soak.repo.repository.removals("models", MODEL).removed()
    living = {version.version for version in soak.repo.models.versions(MODEL)}
    assert set(done) <= living | removed
    assert len(living) >= min(KEPT_VERSIONS, len(done))
    for number in living:
        state = soak.repo.models.restore(f"{MODEL}@{number}").state
        assert is_state(state), number
        assert state["step"] == done.get(number, state["step"])
        assert state["step"] in {line["step"] for line in saved["begun"]}
    assert not soak.repo.models.verify([f"{MODEL}@{number}" for number in sorted(living)]).problems
    return len(done), len(living)


def check_data(soak):
    """Every image that was reported is in the newest version unless its deletion was begun, and none twice."""
    ingested, deleted = soak.book("ingester"), soak.book("deleter")
    samples = list(soak.repo.dataset(DATA)["train"])
    numbers = [int(Path(sample["key"]).stem) for sample in samples]
    assert len(numbers) == len(set(numbers))
    for number, sample in zip(numbers, samples, strict=True):
        assert sample["image"] == image_of(number), number

    def all_of(lines, field):
        return {value for line in lines for value in line[field]}

    def numbers_of(lines):
        return {int(Path(key).stem) for key in all_of(lines, "keys")}

    must = all_of(ingested["done"], "numbers") - numbers_of(deleted["begun"])
    may = all_of(ingested["begun"], "numbers") - numbers_of(deleted["done"])
    assert must <= set(numbers) <= may
    return len(numbers), len(deleted["done"])


def check_nothing_is_left(soak):
    """After one more gc, the repository has only what versions need; every version is whole."""
    swept = gc(soak.repo.repository, grace_s=0, no_writers=True, dry_run=False)
    again = gc(soak.repo.repository, grace_s=0, no_writers=True, dry_run=False)
    assert not again.objects
    assert not list(Path(soak.repo.repository.url).rglob(".tmp-*"))
    for version in soak.repo.datasets.versions(DATA):
        assert not soak.repo.datasets.verify(str(version), deep=True).problems
    return len(swept.objects)


@pytest.mark.long
@pytest.mark.timeout(SOAK_S + 400)
def test_after_kills_and_power_cuts_the_repository_has_all_that_was_reported_and_nothing_else(tmp_path):
    seed = int(os.environ.get("DATASVC_SOAK_SEED", secrets.randbits(32)))
    say(f"soak of {SOAK_S:g} s with DATASVC_SOAK_SEED={seed}")
    soak = Soak(tmp_path, chance := random.Random(seed))
    deadline = time.monotonic() + SOAK_S
    try:
        while time.monotonic() < deadline:
            soak.start()
            time.sleep(chance.uniform(2, 12))
            chance.choice([soak.end_one, soak.end_one, soak.move_clocks, soak.move_clocks, soak.cut_power])()
        soak.start()
        soak.wait_for_work()
        soak.stop()
    finally:
        soak.kill()
    num_done, num_living = check_models(soak)
    num_samples, num_deletions = check_data(soak)
    num_left = check_nothing_is_left(soak)
    epochs = soak.book("trainer")
    sweeps = soak.book("sweeper", "other-sweeper")["done"]
    num_swept = sum(line["objects"] for line in sweeps)
    say(f"{dict(soak.done)}; {num_done} saves, {num_living} versions kept, {num_samples} images")
    say(f"{num_deletions} deletions, {len(epochs['done'])} epochs, {num_swept} objects swept, {num_left} at the end")
    assert num_done
    assert num_samples
    assert epochs["done"]
    assert num_swept or SOAK_S < 5 * GRACE_S
