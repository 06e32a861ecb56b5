"""The GPU day without a GPU: every stage runs to where it needs one, and what comes behind is run with stand-ins."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
STAGES = ["gpu_tests", "loading", "training", "profiling", "saving", "digits", "ranks", "layouts"]
MEASURING = {"loading", "training", "profiling"}  # for ten seconds and more, before they need a GPU
PROFILE = {
    "measured": {"serial": 0.2},
    "rounds": [{"measured_s": {"serial": 0.2}, "predicted_s": {"serial": 0.1}} for _ in range(2)],
}


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    """Find modules as the programs do."""
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])


@pytest.fixture
def make_stage(tmp_path, monkeypatch):
    """Makes stages whose programs print what a test says, with or without a GPU."""
    from gpu_stages import loading, profiling
    from gpu_stages.stage import Stage

    class Standing(Stage):
        def __init__(self, device, answers, kept):
            super().__init__(tmp_path, device=device, kept=kept or Path(tempfile.mkdtemp(dir=tmp_path)))
            self.commands, self._answers = [], answers

        def run(self, *command, **how):  # noqa: ARG002 - as a stage
            self.commands.append(" ".join(map(str, command)))
            return next(answer(command) for word, answer in self._answers.items() if word in self.commands[-1])

    def make(device="cpu", kept=None, **answers):
        if device == "cuda":  # what is too large here is not made
            for module in (loading, profiling):
                monkeypatch.setattr(module, "make_photos", lambda folder, num_images: (folder, SmallSplit()))
            monkeypatch.setattr(loading, "Cache", SmallCache)
        monkeypatch.setattr(profiling, "measure", lambda *arguments, **options: PROFILE)
        return Standing(device, answers, kept)

    return make


class SmallSplit:
    class table:  # noqa: N801 - an attribute
        size_bytes = 1


class SmallCache:
    def __init__(self, folder, budget):
        pass

    def stage(self, splits):
        pass

    def close(self):
        pass


def run(name, stage):
    __import__(f"gpu_stages.{name}")
    sys.modules[f"gpu_stages.{name}"].run(stage)
    return {figure.name: list(figure.values) for figure in stage.report.rows + stage.report.ratios}


def write_junit(*outcomes):
    """Return what writes a report of tests as pytest does, where its command says."""

    def write(command):
        (path,) = (word.partition("=")[2] for word in command if str(word).startswith("--junitxml="))
        cases = "".join(
            f'<testcase classname="tests.t" name="t{n}">{"" if outcome == "passed" else f"<{outcome}/>"}</testcase>'
            for n, outcome in enumerate(outcomes)
        )
        Path(path).write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        return ""

    return write


def lines(*values):
    printed = "\n".join(["some text", *map(json.dumps, values)])
    return lambda command: printed


CHECKED = {"num_checks": 27, "loss": 0.1, "times_ms": {"all-reduce of 1 kB": [1.0, 2.0]}}
ENDED = ({"event": "step", "step_s": 0.25}, {"event": "end", "val_accuracy": 0.98})
ANSWERS = {
    "gpu_tests": {"pytest": write_junit("skipped", "skipped")},
    "digits": {"make_digits": lambda command: make_digits(command[-1]), "trainer": lines(*ENDED)},
    "ranks": {"rank_checks": lines(CHECKED)},
    "layouts": {"layout_checks": lines({"losses": [2.0, 1.0], "peak_bytes": {"whole": 0, "recompute": 0}})},
}


def make_digits(folder):
    from tests.samples import write_folder

    write_folder(Path(folder), {"train": {"a": 2}, "val": {"a": 1}})
    return ""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in MEASURING else name for name in STAGES]
)
def test_a_stage_runs_to_where_it_needs_a_gpu_and_says_what_was_not_done(make_stage, name):
    from gpu_stages.stage import FIGURES, NeedsGpu

    stage = make_stage(**ANSWERS.get(name, {}))
    with pytest.raises(NeedsGpu, match=r"\b(not|no|nothing|skipped)\b"):
        run(name, stage)
    assert stage.durations
    found = json.loads((stage.folder / FIGURES).read_text())
    assert found["device"] is None or found["device"]["name"]
    assert found["versions"].keys() >= {"python", "torch"}
    assert found["durations_s"].keys() == stage.durations.keys()


@pytest.fixture
def few_files(monkeypatch):
    from gpu_stages import gpu_tests

    files = [ROOT / "tests" / f"test_{letter}.py" for letter in "abc"]
    monkeypatch.setattr(gpu_tests, "find_test_files", lambda tests: files)
    monkeypatch.setattr(gpu_tests, "FILES_PER_RUN", 3)


@pytest.mark.usefixtures("few_files")
def test_with_a_gpu_failed_tests_fail_the_stage_by_name_and_a_crash_is_one_of_them(make_stage):
    stage = make_stage("cuda", pytest=write_junit("passed", "failure", "error", "skipped"))
    with pytest.raises(SystemExit, match=r"4 tests failed: tests.t::t1, tests.t::t2"):
        run("gpu_tests", stage)
    assert all("-n 1" in command for command in stage.commands)
    assert all("--timeout-method=thread" in command for command in stage.commands)  # in a driver no signal is heeded
    counts = {"passed": [1], "failed": [2], "skipped": [1]}
    apart = {f"gpu-window, {name}": values for name, values in counts.items()}
    assert {row.name: row.values for row in stage.report.rows} == counts | apart
    with pytest.raises(SystemExit, match="no test was collected"):
        run("gpu_tests", make_stage("cuda", pytest=write_junit()))
    run("gpu_tests", make_stage("cuda", pytest=write_junit("passed")))


@pytest.mark.usefixtures("few_files")
def test_a_stage_that_was_ended_continues_with_the_parts_that_are_not_done(make_stage, monkeypatch, tmp_path):
    from gpu_stages import gpu_tests

    monkeypatch.setattr(gpu_tests, "FILES_PER_RUN", 1)
    write, kept = write_junit("passed"), tmp_path / "kept"
    kept.mkdir()

    def write_or_end(command):
        if any(str(word).endswith("test_b.py") for word in command):
            raise KeyboardInterrupt
        return write(command)

    first = make_stage("cuda", kept, pytest=write_or_end)
    with pytest.raises(KeyboardInterrupt):
        run("gpu_tests", first)
    assert next((row.name, row.values) for row in first.report.rows) == ("passed", [1])
    second = make_stage("cuda", kept, pytest=write)
    assert run("gpu_tests", second)["passed"] == [3]
    assert not any("test_a.py" in command and "-k not" in command for command in second.commands)


def test_the_first_three_stages_have_eight_minutes_and_all_have_fifteen(tmp_path, monkeypatch, capsys):
    """What a stage does not need goes to the last ones, and none starts that would end at once."""
    import gpu_day

    assert list(gpu_day.STAGES)[:3] == ["gpu_tests", "loading", "training"]
    assert sum(gpu_day.LIMITS_S[name] for name in list(gpu_day.STAGES)[:3]) <= 480
    assert gpu_day.LIMITS_S.keys() == gpu_day.STAGES.keys()
    assert sum(gpu_day.LIMITS_S.values()) <= 900
    now, limits = [0.0], {}

    def run_stage(name, title, out, limit_s):
        limits[name] = limit_s
        now[0] += 880.0 if name == "saving" else 10.0
        outcome = outcome_of(name, "done")
        (out / f"{name}.json").write_text(json.dumps(outcome))
        return outcome

    monkeypatch.setattr(gpu_day, "run_stage", run_stage)
    monkeypatch.setattr(gpu_day.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        gpu_day.main()
    assert end.value.code == 1
    assert limits["loading"] == 900 - 10 - sum(list(gpu_day.LIMITS_S.values())[2:])
    assert list(limits) == ["gpu_tests", "loading", "training", "profiling", "saving"]
    assert "digits: no time left; the same command continues here" in capsys.readouterr().out


def test_the_files_with_tests_for_a_gpu_are_found():
    from gpu_stages.gpu_tests import find_test_files

    found = {str(path.relative_to(ROOT)) for path in find_test_files(ROOT / "tests")}
    assert {
        "tests/models/saving/test_staging_buffer.py",
        "tests/loaders/images/test_image_loader_devices.py",
    } <= found
    assert "tests/test_order.py" not in found


def test_with_a_gpu_a_decoder_that_ends_its_process_is_named_and_the_others_are_measured(make_stage):
    def measured(command):
        decode = command[command.index("--decode") + 1]
        if decode == "gpu-window":
            if "--cache" in command:
                raise subprocess.TimeoutExpired("python", 60)
            raise subprocess.CalledProcessError(-11, "python")
        return json.dumps({"images_per_s": 100.0 if decode == "cpu" else 400.0, "decode": decode})

    found = run("loading", make_stage("cuda", loading_rate=measured))
    assert found["memory, cpu"] == [100.0] * 2
    assert found["cache, gpu-whole / cpu"] == [4.0] * 2
    assert found["memory, auto"] == [400.0]  # once: it is one of the others
    assert found["memory, gpu-window: ended with status -11, after so many runs"] == [0]
    assert found["cache, gpu-window: killed after 30 s, after so many runs"] == [0]
    assert "cache, gpu-window" not in found


def test_rates_are_written_after_each_repeat(make_stage):
    from gpu_stages.stage import FIGURES

    written = []

    def measured(command):
        path = stage.folder / FIGURES
        written.append(len(json.loads(path.read_text())["rows"]) if path.exists() else 0)
        return json.dumps({"images_per_s": 1.0})

    stage = make_stage("cuda", loading_rate=measured)
    run("loading", stage)
    assert (written[0], written[-1]) == (0, 8)


def test_a_program_of_a_stage_is_killed_at_its_limit(tmp_path):
    from gpu_stages.stage import Stage

    with pytest.raises(subprocess.TimeoutExpired):
        Stage(tmp_path).run("-c", "import time; time.sleep(600)", limit_s=0.1)


def test_with_a_gpu_both_models_are_profiled(make_stage):
    found = run("profiling", make_stage("cuda"))
    assert (
        found["ResNet-50, serial: predicted / measured"]
        == found["AlexNet, serial: predicted / measured"]
        == [0.5] * 2
    )


def test_with_a_gpu_digits_below_97_percent_fail(make_stage):
    stage = make_stage("cuda", **ANSWERS["digits"])
    found = run("digits", stage)
    assert found == {
        name: [value] for p in ("fp16", "bf16") for name, value in ((f"{p}: accuracy", 0.98), (f"{p}: step", 250.0))
    }
    assert "--precision fp16 --device cuda" in stage.commands[1]
    bad = {**ANSWERS["digits"], "trainer": lines(ENDED[0], {"event": "end", "val_accuracy": 0.9})}
    (stage.folder / "repository").rename(stage.folder / "first")
    with pytest.raises(SystemExit, match=r"below 97% .*'bf16': 0.9"):
        run("digits", make_stage("cuda", **bad))


def test_with_a_gpu_operations_and_steps_of_ranks_are_timed(make_stage):
    blocks = [{"workload": "w", "way": way, "ms": ms} for way, ms in (("ours", 2.0), ("DDP", 3.0)) for _ in range(2)]
    stage = make_stage("cuda", rank_checks=lines(CHECKED), run_part=lines(*blocks))
    found = run("ranks", stage)
    assert found["1 of NCCL: all-reduce of 1 kB"] == [1.0, 2.0]
    assert found["2 of gloo, w: time of DDP / ours"] == [1.5, 1.5]
    assert [command.count("cuda") for command in stage.commands] == [1, 1, 1]


def test_with_a_gpu_the_memory_of_layouts_is_compared_with_that_of_a_whole_model(make_stage):
    found = {"losses": [2.0, 1.0], "peak_bytes": {"whole": 4e6, "recompute": 1e6, "offload": 2e6}}
    stage = make_stage("cuda", layout_checks=lines(found))
    figures = run("layouts", stage)
    assert figures["1 rank, offload: peak memory of the GPU"] == [2.0]
    assert figures["1 rank: peak of recompute / whole"] == [0.25]
    assert figures["2 of gloo, pipeline on cuda: last loss, as of one process"] == [1.0]
    assert ["-np 2" in command for command in stage.commands] == [False, True]
    assert all("--device cuda" in command and "--width" not in command for command in stage.commands)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_each_way_of_a_layout_has_the_losses_of_a_whole_model(tmp_path, num_ranks):
    from gpu_stages import layouts, ranks
    from gpu_stages.stage import Stage, last_json

    stage, options = Stage(tmp_path, device="cpu"), ("--device", "cpu", "--width", 16, "--block", 8)
    if num_ranks == 1:
        printed = stage.run("-P", layouts.CHECKS, *options)
    else:
        printed = ranks.launch(stage, num_ranks, layouts.CHECKS, *options)
    first, *_, last = last_json(printed)["losses"]
    assert last < first


@pytest.mark.slow
def test_with_a_gpu_saves_and_steps_are_compared(make_stage, monkeypatch):
    """As on a GPU, with the small sizes and the CPU in its place."""
    from gpu_stages.stage import Stage

    monkeypatch.setattr(Stage, "has_gpu", True)
    monkeypatch.setattr(Stage, "choose", lambda stage, on_gpu, without: without)
    found = run("saving", make_stage())
    assert {"small-cnn: step while a save is written / step", "adamw: blocked, datasvc / torch.save"} <= found.keys()
    for name in ("repository", "cache", "photos"):
        assert not (make_stage().folder / name).exists()
    assert "small-cnn: ours / torch's folder" in run("training", make_stage())


def day(monkeypatch, capsys, *arguments, statuses=()):
    """Run the program with stages that end as told; returns its exit status, what it printed, and what it ran."""
    import gpu_day

    ran, left = [], dict(statuses)

    def run_stage(name, title, out, limit_s):
        ran.append(name)
        outcome = outcome_of(name, left.get(name, "done"))
        (out / f"{name}.json").write_text(json.dumps(outcome))
        return outcome

    monkeypatch.setattr(gpu_day, "run_stage", run_stage)
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", *map(str, arguments)])
    try:
        gpu_day.main()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    return status, capsys.readouterr().out, ran


def outcome_of(name, status, **more):
    return {
        "stage": name,
        "title": f"Title of {name}",
        "status": status,
        "reason": "" if status == "done" else "because",
        "command": f"python tools/gpu_day.py OUT --stage {name}",
        "began": "2026-11-22T10:00:00+00:00",
        "duration_s": 61.2,
        **more,
    }


def test_stages_that_are_done_are_not_run_again_and_a_failed_one_stops_no_other(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    statuses = {"loading": "failed", "digits": "needs-gpu"}
    status, printed, ran = day(monkeypatch, capsys, out, statuses=statuses)
    assert (status, ran) == (1, STAGES)
    assert "loading: failed after 61 s: because" in printed
    status, _, ran = day(monkeypatch, capsys, out, statuses={"digits": "needs-gpu"})
    assert (status, ran) == (0, ["loading", "digits"])
    (out / "saving.json").unlink()  # as after a kill: a stage that was under way has no file
    _, printed, ran = day(monkeypatch, capsys, out, "--stage", "saving", "ranks")
    assert ran == ["saving"]
    assert "ranks: done before" in printed


def test_the_table_has_the_name_of_the_device_and_every_figure_with_its_spread(tmp_path, monkeypatch, capsys):
    device = {"name": "NVIDIA H200", "count": 1, "memory_gib": 139.8, "cuda": "13.0", "driver": "580.1"}
    machine = {"cpu": "a processor", "cores": 16, "memory_gib": 128.0, "python": "3.12.3"}
    row = {"name": "memory, cpu", "unit": "images/s", "median": 12345.0, "min": 12000.0, "max": 13000.0, "n": 3}
    ratio = {"name": "a / b", "median": 1.234, "min": 1.234, "max": 1.234, "n": 1}
    found = {"device": device, "machine": machine, "versions": {"torch": "2.11.0"}, "rows": [row], "ratios": [ratio]}
    outcomes = [
        outcome_of("loading", "done", commit="abc", durations_s={"photos": 12.3}, **found),
        outcome_of("ranks", "failed", commit="abc", **found),
    ]
    for outcome in outcomes:
        (tmp_path / f"{outcome['stage']}.json").write_text(json.dumps(outcome))
    _, printed, ran = day(monkeypatch, capsys, tmp_path, "--table")
    assert not ran
    assert printed.count("1 x NVIDIA H200 (139.8 GiB, CUDA 13.0, driver 580.1); 16 cores of a processor") == 1
    assert "| memory, cpu, images/s | 12,345 (12,000-13,000) | 3 |" in printed
    assert "| a / b | 1.23 | 1 |" in printed
    assert "### Title of loading: `python tools/gpu_day.py OUT --stage loading`" in printed
    assert "It took 61 s: photos 12 s." in printed
    assert "**failed**: because" in printed


def test_all_packages_that_are_missing_are_named_before_anything_is_run(tmp_path, monkeypatch):
    import gpu_day

    missing = {"tenacity", "PIL", "sklearn"}
    monkeypatch.setattr(gpu_day, "find_spec", lambda name: None if name in missing else name)
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"not installed: pip install tenacity pillow scikit-learn$"):
        gpu_day.main()
    assert not (tmp_path / "out").exists()
    assert gpu_day.find_missing(["loading"]) == ["tenacity", "pillow"]


def test_the_stages_are_listed(monkeypatch, capsys):
    _, printed, _ = day(monkeypatch, capsys, "--list")
    assert [line.split()[0] for line in printed.splitlines()] == STAGES


# A program that starts one that would outlive it, in a session of its own, and says its number.
ORPHANING = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
{end}
"""
RUNNING = """
import sys
from pathlib import Path
from gpu_stages.runner import _run
print(_run([sys.executable, "-c", {program!r}], Path({log!r}), {limit_s}))
"""


@pytest.mark.parametrize(
    ("end", "limit_s", "problem"),
    [
        ("", 60, ""),
        ("sys.exit(3)", 60, "the stage ended with status 3"),
        ("import os; os.kill(os.getpid(), 11)", 60, "the stage was killed by signal 11"),
        ("import time; time.sleep(600)", 2, "the stage took longer than 2 s and was ended"),
    ],
)
def test_nothing_that_a_stage_has_started_outlives_it(tmp_path, end, limit_s, problem):
    log = tmp_path / "log"
    code = RUNNING.format(program=ORPHANING.format(end=end), log=str(log), limit_s=limit_s)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{TOOLS}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(problem)
    orphan = log.read_text().strip()
    assert not orphan or not Path("/proc", orphan).exists()
    assert orphan or limit_s < 60  # it may not have been started by then


def test_packages_of_a_folder_that_only_pythonpath_names_are_found_by_the_programs_of_a_stage(tmp_path, monkeypatch):
    from tools.bench import profile_check

    (tmp_path / "only_there.py").touch()
    log = tmp_path / "log"
    code = RUNNING.format(program="import only_there", log=str(log), limit_s=60)
    given = os.pathsep.join(map(str, (ROOT, TOOLS, tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "", log.read_text()
    from gpu_stages.stage import Stage

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert Stage(tmp_path).run("-c", "import only_there, tools.bench.runner; print('found')") == "found\n"
    ran = []

    def run(command, env, **how):
        ran.append(env["PYTHONPATH"].split(os.pathsep))
        return subprocess.CompletedProcess(command, 0, "{}")

    monkeypatch.setattr(profile_check.subprocess, "run", run)
    profile_check.measure([], "repository", 1, 1, 1)
    assert ran == [[str(ROOT), str(tmp_path)]]


@pytest.mark.slow
def test_a_day_that_is_killed_leaves_no_process_and_its_stage_runs_again(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, TOOLS / "gpu_day.py", tmp_path / "out", "--stage", "profiling"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (pids := children.read_text().split()):
            assert process.poll() is None
            os.sched_yield()
        descriptor = os.pidfd_open(int(pids[0]))
        process.send_signal(signal.SIGKILL)
    assert wait([descriptor], 60)
    os.close(descriptor)
    assert not (tmp_path / "out" / "profiling.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", STAGES)
def test_every_stage_runs_here_as_the_program_runs_it(tmp_path, name):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, TOOLS / "gpu_day.py", tmp_path / "out", "--stage", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout
    path = tmp_path / "out" / f"{name}.json"
    assert path.stat().st_size < 1_000_000
    outcome = json.loads(path.read_text())
    assert outcome["status"] in {"needs-gpu", "done"}, outcome["log_tail"]
    assert outcome.keys() >= {"stage", "title", "reason", "command", "began", "duration_s", "limit_s", "log_tail"}
    assert outcome.keys() >= {"commit", "machine", "device", "versions", "durations_s", "rows", "ratios"}
