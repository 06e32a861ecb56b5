"""Processors and memory of a run, which people look at first: whose they are, of how many, and counted once."""

import json
import subprocess

import pytest
import torch

import datasvc
from datasvc.runs import read_run
from datasvc.runs.resources import CPU, GPU_MEMORY, MEMORY, NODE_MEMORY, RESOURCES, ResourceMeter
from datasvc.runs.run_folders import run_folder
from datasvc.runs.step_table import MAX_NAMES
from tests.formats.test_golden import RUN_PART, golden
from tests.support import warm_python
from tests.ui.conftest import browser, check_accessible, check_width, page, running_ui  # noqa: F401 - fixtures

ELAPSED_S = 4.0
BURNT_S = 0.2
# Measures in a process of its own: the process of the tests has threads, and children of other tests.
PROGRAM = """
import json, subprocess, sys, time
from datasvc.threads import count_processors
from datasvc.runs.resources import CPU, GPU_MEMORY, MEMORY, NODE_MEMORY, ResourceMeter

elapsed_s, burnt_s = map(float, sys.argv[1:3])
now_s = 0.0
meter = ResourceMeter(lambda: now_s)

def read():
    global now_s
    now_s += elapsed_s  # each reading is that much later
    return meter.read()

def used_s():
    return read()[CPU] / 100 * elapsed_s * count_processors()

def burn():
    until_s = time.process_time() + burnt_s
    while time.process_time() < until_s:
        pass

before_s = time.process_time()
read()
burn()
own = [used_s(), used_s(), time.process_time() - before_s]

# A grandchild: workers of a loader may be children of a fork server.
code = f"import time\\nwhile time.process_time() < {burnt_s}: pass\\nprint('burnt', flush=True)\\ninput()"
command = ["sh", "-c", '"$0" -I -S -c "$1"; true', sys.executable, code]
with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
    assert worker.stdout.readline() == b"burnt\\n"
    workers = [used_s()]
    worker.communicate(b"\\n")
workers.append(used_s())

before = read()
held = b"x" * (100 << 20)
after = read()
memory = [after[MEMORY] - before[MEMORY], after[NODE_MEMORY], GPU_MEMORY in after]
print(json.dumps({"own": own, "workers": workers, "memory": memory}))
"""


class Meter:
    """A meter whose clock is `ELAPSED_S` later at each reading."""

    def __init__(self):
        self.now_s = 0.0
        self.meter = ResourceMeter(lambda: self.now_s)

    def read(self):
        self.now_s += ELAPSED_S
        return self.meter.read()


@pytest.fixture(scope="module")
def measured():
    command = [warm_python.command(), "-c", PROGRAM, str(ELAPSED_S), str(BURNT_S)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_the_percentage_is_that_of_all_processors_that_the_process_may_use(measured):
    """tira-io/tirex-tracker#102, ContinualAI/avalanche#1520: above 100 %, and of how many processors?"""
    used_s, used_later_s, process_s = measured["own"]
    assert 0.98 * BURNT_S <= used_s <= process_s
    assert used_later_s < BURNT_S / 2


def test_the_time_of_workers_counts_while_they_live_and_not_again_at_their_end(measured):
    """wandb/wandb#10464, mila-iqia/mila-docs#420: workers of a loader were left out; wandb/wandb#4610: one ended."""
    used_s, used_later_s = measured["workers"]
    assert used_s >= BURNT_S - 0.03  # the kernel counts in ticks
    assert used_later_s < BURNT_S / 2


def test_the_memory_is_that_which_the_process_holds(measured):
    """ncabatoff/process-exporter#105, apify/crawlee-python#1210: pages that processes share were counted for each."""
    held_bytes, node_bytes, has_gpu = measured["memory"]
    assert 95e6 < held_bytes < 120e6
    assert node_bytes > 100e6
    assert not has_gpu


def test_the_memory_of_all_gpus_of_a_process_is_that_which_torch_holds(monkeypatch):
    """The neighbour: without a GPU there is no such curve, and reading it makes no context on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: (3 << 30, 1 << 30)[device])
    assert Meter().read()[GPU_MEMORY] == 4 << 30


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    url = tmp_path_factory.mktemp("resources") / "repo"
    repo = datasvc.open(str(url), create=True)
    refs = []
    for num_curves in (1, 20):
        with repo.runs.start("cnn", data=[]) as log:
            for step in range(1, 4):
                log.report("step", step=step, **{f"curve{number:02}": 1.0 for number in range(num_curves)})
                log.flush()
        refs.append(log.ref)
    # A log of a version that did not measure them, as its golden file has it.
    name, _, run_id = RUN_PART.head["run"].partition("/")
    path = f"{run_folder(name, run_id)}/{RUN_PART.range.file_name}"
    repo.repository.storage.create(path, golden("run-part-1.jsonl"))
    with running_ui(url) as server:
        yield server, repo, refs, f"{name}/{run_id}"


def test_a_program_of_ones_own_has_the_curves_without_a_word(logged):
    """treeverse/dvclive#81: what a run needed was logged by hand."""
    ui, repo, refs, old = logged
    series = repo.runs.read(refs[0]).to_dict()["series"]
    assert {CPU, MEMORY, NODE_MEMORY} <= series.keys()
    assert all(series[name]["steps"] == [1, 2, 3] for name in (CPU, MEMORY))
    assert all(value >= 0 for value in series[CPU]["values"])
    for ref in refs:  # also where there are more curves than are drawn
        _, _, html = ui.get(f"/runs/{ref}")
        assert all(title in html for title, _ in (RESOURCES[CPU], RESOURCES[MEMORY], RESOURCES[NODE_MEMORY]))
    curves = ui.json(f"/runs/compare?run:{refs[0]}=1&run:{refs[1]}=1&run:{old}=1", "curves")
    assert list(curves[MEMORY]) == refs
    assert RESOURCES[CPU][0] in repo.runs.read(refs[0]).to_html()


def test_a_log_of_an_older_version_opens_without_the_curves(logged):
    """What was not measured is absent, not zero."""
    ui, repo, _, old = logged
    assert repo.runs.read(old).series.keys() == {"loss", "rate"}
    status, _, html = ui.get(f"/runs/{old}")
    assert (status, "loss" in html) == (200, True)
    assert RESOURCES[CPU][0] not in html


def test_numbers_that_the_program_reports_are_not_replaced(tmp_path):
    """The neighbour: a program with psutil reports one of these names, another one as many names as a log takes."""
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    with repo.runs.start("cnn") as log:
        log.report("step", step=1, **{CPU: 12.5})
        log.report("step", step=2, **{f"number{number}": 1.0 for number in range(MAX_NAMES)})
    history = read_run(repo.repository, log.name, log.id)
    assert history.series[CPU].values.tolist() == [12.5]
    assert history.series[MEMORY].steps.tolist() == [1]
    assert f"number{MAX_NAMES - 1}" in history.series
    assert not history.problems


def test_the_curves_are_readable_on_a_telephone(logged, page):  # noqa: F811
    """Their titles are longer than those of other curves."""
    ui, _, refs, _ = logged
    for path in (f"/runs/{refs[0]}", f"/runs/compare?run:{refs[0]}=1&run:{refs[1]}=1"):
        page.goto(ui.url + path)
        check_accessible(page)
        check_width(page)
