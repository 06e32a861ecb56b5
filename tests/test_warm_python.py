"""A program that a warm interpreter starts behaves as one that was started by the real one."""

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from tests.support import warm_python

PYTHONS = {"warm": warm_python.command, "real": lambda: sys.executable}
SEEN = "import os, sys; print(sys.argv, os.getcwd(), os.environ['SEEN'], sys.stdin.read()); sys.exit(3)"


@pytest.fixture(params=PYTHONS)
def python(request):
    return PYTHONS[request.param]()


def run(python, *words, **options):
    return subprocess.run([python, *words], capture_output=True, text=True, check=False, **options)


def test_it_has_its_arguments_folder_environment_input_and_status(python, tmp_path):
    done = run(python, "-c", SEEN, "a b", "-x", cwd=tmp_path, input="typed", env={**os.environ, "SEEN": "here"})
    assert done.stdout == f"['-c', 'a b', '-x'] {tmp_path} here typed\n"
    assert done.returncode == 3


def test_a_file_and_a_module_are_programs(python, tmp_path):
    (tmp_path / "neighbour.py").write_text("NAME = 'found'")
    program = tmp_path / "program.py"
    program.write_text("import neighbour, sys\nif __name__ == '__main__': print(neighbour.NAME, sys.argv[1:])")
    assert run(python, program, "1").stdout == "found ['1']\n"
    assert run(python, "-m", "program", "1", cwd=tmp_path).stdout == "found ['1']\n"


def test_an_exception_is_status_1_and_its_traceback(python):
    done = run(python, "-c", "raise ValueError('wrong')")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: wrong\n")


def test_a_signal_ends_it_and_is_the_status(python):
    assert run(python, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)").returncode == -signal.SIGKILL
    with subprocess.Popen([python, "-c", "print(1, flush=True); import time; time.sleep(60)"], stdout=-1) as process:
        process.stdout.readline()
        process.terminate()
        assert process.wait() == -signal.SIGTERM


def test_a_handler_runs_when_the_client_gets_the_signal():
    code = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(7))\nprint(1, flush=True)\nsignal.pause()"
    with subprocess.Popen([warm_python.command(), "-c", code], stdout=-1) as process:
        process.stdout.readline()
        process.terminate()
        assert process.wait() == 7


def test_a_client_that_is_killed_takes_its_program_along():
    code = "import os; print(os.getpid(), os.getppid(), flush=True); import time; time.sleep(60)"
    with subprocess.Popen([warm_python.command(), "-c", code], stdout=-1, text=True) as process:
        pid, parent = map(int, process.stdout.readline().split())
        watched = os.pidfd_open(pid)
        process.kill()
        assert wait([watched], 60)  # ready when the program has ended
    os.close(watched)
    assert parent == os.getpid()


def test_files_that_are_open_have_their_numbers_in_the_program(tmp_path):
    with (tmp_path / "file").open("w") as first, (tmp_path / "other").open("w") as second:
        fds = (first.fileno(), second.fileno())
        code = "import os, sys; [os.write(int(fd), fd.encode()) for fd in sys.argv[1:]]"
        words = [warm_python.command(), "-c", code, *map(str, fds)]
        subprocess.run(words, pass_fds=fds, check=True)
    assert [(tmp_path / name).read_text() for name in ("file", "other")] == [*map(str, fds)]


@pytest.mark.usefixtures("warm_workers")
def test_processes_of_multiprocessing_are_spawned_by_it():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(hex, range(3)) == ["0x0", "0x1", "0x2"]
        parents = set(pool.map(real_parent, range(8)))
    assert os.getpid() not in parents


def real_parent(_):
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1])


def test_other_options_start_a_real_interpreter():
    done = run(warm_python.command(), "-I", "-c", "import sys; print(sys.flags.isolated, 'torch' in sys.modules)")
    assert done.stdout == "1 False\n"
    assert "True" in run(warm_python.command(), "-c", "import sys; print('torch' in sys.modules)").stdout
