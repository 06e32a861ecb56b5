"""Elastic jobs with real ranks, which kill themselves at chosen points."""

import random
import re

import pytest

from datasvc.cache import Cache
from tests.distributed.elastic_jobs import (
    SAME_SIZE,
    TWO_HOSTS,
    ListedHosts,
    Running,
    check_alike,
    check_each_sample_once,
    check_equal,
)
from tests.support import warm_python
from tests.support.pages import find_page

REPLACING = (*SAME_SIZE, *TWO_HOSTS)
SHRINKING = ("--min-num-proc", "1", *TWO_HOSTS)


@pytest.mark.slow
def test_ranks_killed_one_after_the_other_are_replaced_and_nothing_differs(elastic, undisturbed):
    faults = {"1": ["backward", 7], "2": ["half synced", 2], "0": ["commit", 12]}
    result = elastic.result(2, REPLACING, faults=faults)
    check_equal(result, undisturbed)
    assert "rank 1, worker 127.0.0.1:0:1 was killed by SIGKILL; host 127.0.0.1 gets no new ranks" in result["errors"]
    assert "rank 0, worker localhost:0:0 was killed by SIGKILL" in result["errors"]


@pytest.mark.slow
def test_hierarchical_allreduces_continue_with_a_rank_that_replaces_another(elastic):
    options = ("--min-num-proc", "4", *SAME_SIZE[2:], "-H", "localhost:2,127.0.0.1:2", "--hierarchical-allreduce")
    undisturbed = elastic.result(4, options)
    assert "not hierarchical" not in undisturbed["errors"]
    check_equal(elastic.result(4, options, faults={"3": ["backward", 7]}), undisturbed)


@pytest.mark.slow
def test_the_size_of_buckets_is_chosen_again_with_a_rank_that_replaces_another(elastic, undisturbed):
    # The first choice is made in step 7. The new rank has none.
    check_equal(elastic.result(2, REPLACING, faults={"1": ["backward", 9]}, bucket_bytes="auto"), undisturbed)


@pytest.mark.slow
def test_when_rank_0_dies_between_save_and_agreement_the_other_continues_in_its_process(elastic, undisturbed):
    result = elastic.result(2, SHRINKING, faults={"0": ["saved", 8]})
    check_alike(result, undisturbed)
    # The other has saved that step, or heard of the death before.
    assert result["sizes"] in ([2] * 7 + [1] * 13, [2] * 8 + [1] * 12)
    (pid,) = re.findall(r"begins in round 1 as rank 1 of 2 in process (\d+)", result["output"])
    assert result["pid"] == int(pid)


@pytest.mark.slow
def test_ranks_that_derive_their_order_together_do_so_with_a_rank_that_replaces_another(elastic, tmp_path):
    cached = {"cache": str(tmp_path / "cache")}
    Cache(cached["cache"], budget="10MB").close()
    undisturbed = elastic.result(2, REPLACING, **cached)
    check_equal(elastic.result(2, REPLACING, faults={"1": ["step", 5]}, **cached), undisturbed)


STRANGER = """
import os, socket
from torch.distributed import TCPStore
import datasvc.trainer as hvd
from datasvc.trainer.rendezvous import messages, rendezvous

WORDS = [b"", b"{", b"[]", b'{"kind": "Leave", "reason": "go"}', b'{"kind": "RankRequest", "worker": []}']
hvd.init()
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
with socket.create_connection(address) as connection:
    connection.sendall(bytes(range(256)) * 4)
stranger, member = TCPStore(*address, is_master=False), rendezvous.connect(os.environ)
for word in WORDS:
    stranger.queue_push(messages.MESSAGE_QUEUE, word)
    member.queue_push(messages.MESSAGE_QUEUE, word)
hvd.shutdown()
hvd.init()
print("in the second round", hvd.size())
"""


@pytest.mark.slow
def test_words_of_strangers_in_the_store_do_not_end_the_job(launcher):
    done = launcher.run(1, warm_python.command(), "-c", STRANGER, options=("--min-num-proc", "1"))
    assert done.returncode == 0, done.stderr
    assert "in the second round 1" in done.stdout
    # Those with the prefix of the job are ignored; those without it do not reach the driver.
    assert done.stderr.count("ignored a message in the store of the job") == 5


def run_failing(launcher, victims, how, *more):
    """Two ranks that count to 6, of which these fail at step 3."""
    program = launcher.program("elastic_failing.py")
    return launcher.run(2, warm_python.command(), program, victims, how, options=(*SHRINKING, *more))


@pytest.mark.slow
def test_an_exception_of_one_rank_is_its_death_and_the_other_continues_with_its_new_placement(launcher):
    done = run_failing(launcher, "1", "error")
    assert done.returncode == 0, done.stderr
    assert "[localhost:0] started as 0 2 0 2 0 0 2" in done.stdout
    assert "[127.0.0.1:0] started as 1 2 1 2 0 1 2" in done.stdout
    assert "[localhost:0] ends at 6 as 0 1 0 1 0 0 1" in done.stdout
    assert (
        "rank 1, worker 127.0.0.1:0:1 exited with status 1: MemoryError: no memory left on rank 1; "
        "host 127.0.0.1 gets no new ranks, the others continue"
    ) in done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.slow
def test_an_error_that_a_program_catches_and_prints_is_in_the_error_of_the_job(launcher):
    done = run_failing(launcher, "all", "caught")
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("datasvc-run: ") :]
    first, *_ = re.findall(r"rank (\d) \(worker", last)
    caught = "caught: no memory left on rank"
    assert f'exited with status 1 (its output ended with "{caught} {first}")' in last
    assert f"  rank {1 - int(first)}, worker" in last
    assert f'(its output ended with "{caught} {1 - int(first)}")' in last
    assert last.splitlines()[-1].endswith(f"] {caught} {first}")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["vanish", "0"])
def test_a_rank_that_exits_the_training_function_with_status_0_gives_a_warning(launcher, how):
    done = run_failing(launcher, "0", how)
    assert done.returncode == 0, done.stderr
    said = "warning: rank 0, worker localhost:0:0 exited with status 0 before its training function"
    assert done.stderr.count(said) == 1
    assert done.stderr.count("warning: rank") == 1
    assert "[127.0.0.1:0] ends at 6 as 0 1 0 1 0 0 1" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--blacklist-cooldown-range", "0.01", "0.01")])
def test_a_program_that_fails_alike_on_all_ranks_ends_the_job_and_each_is_named(launcher, more):
    done = run_failing(launcher, "all", "error", *more)
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("datasvc-run: ") :]
    first, other = re.findall(r"exited with status 1: MemoryError: no memory left on rank (\d)", last)[:2]
    assert {first, other} == {"0", "1"}
    assert f"datasvc-run: rank {first} (worker" in last
    assert "no rank that had the training's state is left" in last
    assert last.splitlines()[-1].endswith(f"MemoryError: no memory left on rank {first}")


@pytest.mark.slow
def test_ranks_that_raise_one_after_the_other_are_replaced_and_nothing_differs(elastic, undisturbed):
    elastic.launcher.environ["FAULT"] = "error"
    result = elastic.result(2, REPLACING, faults={"1": ["backward", 7], "0": ["commit", 12]})
    check_equal(result, undisturbed)
    assert "rank 1, worker 127.0.0.1:0:1 exited with status 1: TypeError: a program's own fault" in result["errors"]
    assert "rank 0, worker localhost:0:0 exited with status 1: TypeError: a program's own fault" in result["errors"]


def random_faults(seed, num_faults):
    """Points for the ranks that start, and for those that replace them."""
    generator = random.Random(seed)
    running, faults, step = [0, 1], {}, 0
    for number in range(num_faults):
        # A step later at least, so that the one that came last has the state.
        step += generator.randint(1, 4)
        victim = generator.choice(running)
        faults[str(victim)] = [generator.choice(["step", "backward", "commit", "saved"]), step]
        running = [*(each for each in running if each != victim), number + 2]
    return faults


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_ranks_killed_at_twelve_random_points_four_in_each_run_make_no_difference(elastic, undisturbed, seed):
    faults = random_faults(seed, 4)
    result = elastic.result(2, REPLACING, faults=faults)
    check_equal(result, undisturbed)
    assert result["errors"].count("was killed by SIGKILL") == len(faults)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "point"), [("2", "connect"), ("2", "groups"), ("2", "sync")])
def test_a_second_death_while_the_ranks_connect_leads_to_one_more_round(elastic, undisturbed, victim, point):
    result = elastic.result(2, REPLACING, faults={"1": ["step", 5], victim: [point, 2]})
    check_equal(result, undisturbed)
    assert result["errors"].count("was killed by SIGKILL") == 2


@pytest.mark.slow
@pytest.mark.parametrize("point", ["groups", "half synced"])
def test_rank_0_may_be_the_second_that_dies(elastic, undisturbed, point):
    options = ("--min-num-proc", "1", "-H", "localhost:1,127.0.0.1:2")
    result = elastic.result(3, options, faults={"1": ["step", 5], "0": [point, 2]})
    check_alike(result, undisturbed)
    assert result["sizes"] == [3] * 5 + [1] * 15


@pytest.mark.slow
def test_rank_0_may_die_while_the_others_wait_for_the_order_that_it_derives(elastic, tmp_path):
    Cache(tmp_path / "cache", budget="10MB").close()
    options = ("--min-num-proc", "1", "-H", "localhost:1,127.0.0.1:2")
    faults = {"1": ["step", 5], "0": ["choose", 2]}
    result = elastic.result(3, options, faults=faults, cache=str(tmp_path / "cache"))
    check_each_sample_once(result)
    assert result["sizes"] == [3] * 5 + [1] * 15


@pytest.mark.slow
def test_two_at_once_and_all_but_one_may_die(elastic, undisturbed):
    faults = {"0": ["backward", 6], "2": ["backward", 6], "1": ["commit", 9]}
    result = elastic.result(4, ("--min-num-proc", "1", "-H", "localhost:2,127.0.0.1:2"), faults=faults)
    check_alike(result, undisturbed)
    # The last has saved that step, or heard of the death before.
    assert result["sizes"] in ([4] * 6 + [2] * 2 + [1] * 12, [4] * 6 + [2] * 3 + [1] * 11)
    assert len(result["resets"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_comes_in_the_middle_of_an_epoch_and_another_goes(elastic, undisturbed):
    hosts = ListedHosts(elastic.folder, "localhost:1", "127.0.0.1:1")
    elastic.launcher.environ["HVD_DISCOVERY_INTERVAL"] = "0.1"
    job = elastic.start(2, ("--min-num-proc", "1", *hosts.options), sizes={"5": 3, "12": 2})
    job.read_until("committed 5 of 2")
    hosts.set("localhost:2", "127.0.0.1:1")
    job.read_until("committed 12 of 3")
    hosts.set("localhost:2")
    result = job.result()
    check_alike(result, undisturbed)
    assert result["sizes"] == [2] * 5 + [3] * 7 + [2] * 8
    assert "this worker leaves the job: its slot on 127.0.0.1 was removed" in result["errors"]
    assert "was killed" not in result["errors"]


@pytest.mark.slow
def test_ranks_get_the_notice_of_a_change_of_hosts_before_they_commit(launcher, tmp_path):
    hosts = ListedHosts(tmp_path, "localhost:1", "127.0.0.1:1")
    launcher.environ["HVD_DISCOVERY_INTERVAL"] = "0.1"
    program = launcher.program("elastic_notified.py")
    options = ("--min-num-proc", "1", *hosts.options)
    job = Running(launcher.start(2, warm_python.command(), program, options=options), None)
    for _ in range(2):
        job.read_until("trains on as rank")
    hosts.set("localhost:1")
    done = job.end()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("told of 1 before a commit, with 1 message") == 2
    assert "[localhost:0] ends at 1 with last change 1" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_hangs_is_left_behind_and_ended(elastic, undisturbed):
    elastic.launcher.environ.update(
        {"FAULT": "stop", "HOROVOD_GLOO_TIMEOUT_SECONDS": "3", "HVD_ELASTIC_HANG_TIMEOUT": "3"}
    )
    options = (*SHRINKING, "--grace-s", "1")
    result = elastic.result(2, options, faults={"1": ["step", 5]})
    check_alike(result, undisturbed)
    assert "rank 1, worker 127.0.0.1:0:1 did not request a rank in time and is terminated" in result["errors"]


@pytest.mark.slow
def test_a_rank_that_ends_well_before_the_others_does_not_end_their_training(elastic, undisturbed):
    elastic.launcher.environ["FAULT"] = "end"
    result = elastic.result(2, ("--min-num-proc", "2", *TWO_HOSTS), faults={"0": ["step", 11]})
    check_alike(result, undisturbed)
    assert result["sizes"] == [2] * 11 + [1] * 9
    assert "the job finishes with 1 of the 2 ranks" in result["errors"]


@pytest.mark.slow
def test_the_reset_limit_ends_the_job_with_status_3(elastic):
    done = elastic.run(
        3,
        ("--min-num-proc", "1", "-H", "localhost:3", "--reset-limit", "1"),
        faults={"0": ["step", 3], "1": ["step", 6]},
    )
    assert done.returncode == 3
    assert "the reset limit of 1 is reached" in done.stderr


@pytest.mark.slow
def test_twenty_rounds_leave_no_threads_and_no_open_files_behind(launcher):
    done = launcher.run(2, warm_python.command(), launcher.program("elastic_rounds.py"), options=SHRINKING)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nothing is left behind") == 2


@pytest.mark.slow
def test_ranks_that_die_leave_no_threads_and_no_open_files_behind_in_others(elastic):
    faults = {"1": ["step", 3], "2": ["backward", 6], "3": ["commit", 9]}
    result = elastic.result(2, REPLACING, faults=faults)
    assert len(result["resets"]) == 3
    assert len(set(result["threads"])) == 1, result["threads"]
    assert len(set(result["files"])) == 1, result["files"]


@pytest.mark.slow
def test_the_program_on_the_page_runs(launcher, tmp_path):
    page = find_page("elastic.md").read_text()
    program = tmp_path / "train.py"
    program.write_text(re.search(r"```python\n# train.py\n(.*?)```", page, re.DOTALL)[1])
    done = launcher.run(2, warm_python.command(), program, options=SHRINKING)
    assert done.returncode == 0, done.stderr
    assert "epoch 40: loss 0.0000 with 2 ranks" in done.stdout
