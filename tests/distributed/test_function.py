"""``datasvc.trainer.run``: a function on every rank, with real processes. Torch is loaded only where it is needed."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading

import cloudpickle
import pytest

from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.function import run
from datasvc.trainer.function.pickling import RankTracebackError


def place():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@pytest.fixture(autouse=True, scope="module")
def by_value():
    """Of a test's own module ranks know nothing: sends its functions by value, like those of a script."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def greet():
    sys.stdout.write("hello\n")


def test_results_come_in_rank_order():
    def scale(factor, *, offset):
        rank, size = place()
        return {"rank": rank, "size": size, "value": factor * rank + offset}

    results = run(scale, (10,), {"offset": 1}, num_proc=3)
    assert results == [{"rank": rank, "size": 3, "value": 10 * rank + 1} for rank in range(3)]


def test_ranks_talk_and_return_tensors():
    def reduce(value):
        import torch

        import datasvc.trainer as hvd

        hvd.init()
        return hvd.allreduce(torch.full((2,), value + hvd.rank()), op=hvd.Sum)

    results = run(reduce, (1.0,), np=2)
    assert [result.tolist() for result in results] == [[3.0, 3.0], [3.0, 3.0]]


def test_one_rank_is_the_default_and_its_output_has_no_prefix(capfd):
    assert run(greet) == [None]
    assert capfd.readouterr().out == "hello\n"


@pytest.mark.slow
def test_functions_and_classes_of_a_script_come_back_as_its_own(launcher, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import datasvc.trainer.function
        FACTOR = 3
        class Result:
            def __init__(self, value): self.value = value
        class OwnError(Exception): pass
        def work(x):
            if x < 0: raise OwnError("negative")
            return Result(FACTOR * x)
        results = datasvc.trainer.function.run(work, (2,), num_proc=2)
        assert all(type(result) is Result and result.value == 6 for result in results)
        try:
            datasvc.trainer.function.run(work, (-1,))
        except OwnError as error:
            print("caught", error)
        """)
    )
    done = subprocess.run(
        [sys.executable, script], env=launcher.environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.stdout == "caught negative\n", done.stderr


def test_the_exception_of_a_rank_is_raised_with_its_type_and_traceback():
    def fail_on_one():
        if place()[0] == 1:
            raise KeyError("missing")
        signal.pause()

    with pytest.raises(KeyError, match="missing") as caught:
        run(fail_on_one, num_proc=2)
    assert isinstance(caught.value.__cause__, RankTracebackError)
    assert "on rank 1" in str(caught.value.__cause__)
    assert "in fail_on_one" in str(caught.value.__cause__)


def test_a_rank_that_is_killed_is_named():
    def die_on_one():
        if place()[0] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(HorovodInternalError, match="rank 1 was the first to fail: it was killed by SIGKILL"):
        run(die_on_one, num_proc=2)


def test_a_result_that_cannot_be_pickled_is_an_error():
    with pytest.raises(TypeError, match="the result of rank 0, a generator, cannot be pickled"):
        run(lambda: (x for x in []))


def test_a_rank_that_leaves_without_a_result_is_an_error():
    with pytest.raises(HorovodInternalError, match=r"rank 0 called sys\.exit\(0\)"):
        run(lambda: sys.exit(0))
    with pytest.raises(HorovodInternalError, match="rank 0 ended with status 0 before the function returned"):
        run(lambda: os._exit(0))


ELASTIC = {"num_proc": 2, "min_num_proc": 1, "hosts": "localhost:1,127.0.0.1:1"}


def test_an_elastic_function_that_needs_no_other_rank_gives_a_result_for_each():
    assert run(place, **ELASTIC) == [(0, 2), (1, 2)]


def test_an_elastic_function_that_fails_on_all_ranks_raises_what_the_first_has_raised():
    def fail():
        raise KeyError(f"rank {place()[0]}")

    with pytest.raises(KeyError, match=r"rank [01]") as caught:
        run(fail, **ELASTIC)
    assert isinstance(caught.value.__cause__, RankTracebackError)


def test_an_elastic_function_that_leaves_without_any_result_is_an_error():
    with pytest.raises(HorovodInternalError, match="rank 0 ended with status 0 before the function returned"):
        run(lambda: sys.exit(0), **ELASTIC)


@pytest.mark.slow
def test_an_elastic_function_continues_without_a_rank_that_raises(capfd):
    def train():
        import datasvc.trainer as hvd

        hvd.init()
        first_rank = hvd.rank()

        @hvd.elastic.run
        def count(state):
            while state.step < 4:
                if state.step == 2 and first_rank == 1:
                    raise OSError("no space left")
                state.step += 1
                state.commit()
            return hvd.rank(), hvd.size(), os.environ["RANK"], os.environ["HOROVOD_SIZE"]

        return count(hvd.elastic.ObjectState(step=0))

    assert run(train, **ELASTIC) == [(0, 1, "0", "1")]
    errors = capfd.readouterr().err
    assert "exited with status 1: OSError: no space left; host 127.0.0.1 gets no new ranks" in errors
    assert errors.count("Traceback") == 1


def test_it_works_from_a_thread_and_where_output_has_no_bytes_below_it():
    output, results = io.StringIO(), []
    with contextlib.redirect_stdout(output):
        thread = threading.Thread(target=lambda: results.extend(run(greet)))
        thread.start()
        thread.join(60)
    assert (results, output.getvalue()) == ([None], "hello\n")


@pytest.mark.slow
def test_an_interrupt_reaches_the_ranks_and_ends_the_call(launcher, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, datasvc.trainer.function\n"
        "def work():\n"
        "    print('ready', flush=True)\n"
        "    while True: signal.pause()\n"
        "try: datasvc.trainer.function.run(work)\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    process = subprocess.Popen([sys.executable, script], env=launcher.environ, stdout=subprocess.PIPE, text=True)
    launcher.started.append(process)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "interrupted\n"
    assert process.returncode == 0


def test_ranks_on_other_hosts_get_the_function_and_answer(tmp_path, monkeypatch):
    shell = tmp_path / "ssh"
    shell.write_text('#!/bin/sh\nfor last; do :; done\ncd /\nexec env -i PATH=/usr/bin:/bin sh -c "$last"\n')
    shell.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def where():
        return os.environ["HOROVOD_HOSTNAME"], *place()

    assert run(where, num_proc=3, hosts="localhost:1,node7:2") == [
        ("localhost", 0, 3),
        ("node7", 1, 3),
        ("node7", 2, 3),
    ]


def test_arguments_that_describe_no_job_are_refused():
    with pytest.raises(ValueError, match="np=2 is the older name of num_proc=3"):
        run(len, np=2, num_proc=3)
    with pytest.raises(ValueError, match="num_proc is -1; expected a whole number"):
        run(len, num_proc=-1)
    with pytest.raises(ValueError, match="need as many slots"):
        run(len, ((),), num_proc=3, hosts="localhost:2")
    with pytest.raises(ValueError, match="cannot use the host file"):
        run(len, hostfile="no-such-file")


def test_the_python_that_runs_the_ranks_can_be_another(tmp_path, capfd):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "started as $0"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert run(len, ((1, 2),), use_gloo=True, use_mpi=False, disable_cache=True, executable=python) == [2]
    assert capfd.readouterr().out == f"started as {python}\n"
