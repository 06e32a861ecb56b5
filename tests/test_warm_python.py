"""A program that a warm interpreter starts behaves as one that was started by the real one."""

import os
import select
import signal
import subprocess
import sys

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
        assert select.select([watched], [], [], 60)[0]  # ready when the program has ended
    os.close(watched)
    assert parent == os.getpid()


def test_other_options_start_a_real_interpreter():
    done = run(warm_python.command(), "-I", "-c", "import sys; print(sys.flags.isolated, 'torch' in sys.modules)")
    assert done.stdout == "1 False\n"
    assert "True" in run(warm_python.command(), "-c", "import sys; print('torch' in sys.modules)").stdout
