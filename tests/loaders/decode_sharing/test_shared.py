"""Jobs that share their decoding: real processes, real memory, and every way in which one of them may go."""

import itertools
import json
import os
import resource
import secrets
import select
import signal
import socket
import subprocess
import sys
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from datasvc.cache import Cache
from datasvc.errors import BadSampleError, ConfigError, LagError
from datasvc.loaders import ImageLoader
from datasvc.loaders.core.data_ranks import DataRanks
from datasvc.loaders.core.mixture import Mixture
from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.decode_sharing import DecodeGroup, consumer
from datasvc.loaders.decode_sharing.job import ServerJob, start_server
from datasvc.loaders.decode_sharing.loader_spec import LoaderSpec
from datasvc.loaders.decode_sharing.memory import SharedBuffer
from datasvc.loaders.decode_sharing.messages import receive, send
from datasvc.loaders.decode_sharing.rendezvous import address_of, connect_or_listen
from datasvc.loaders.decode_sharing.server import Consumer
from datasvc.loaders.decode_sharing.server import DecodeServer as ServerInside
from datasvc.loaders.decode_sharing.step_index import StepIndex
from datasvc.loaders.profiling.step_times import Stage
from datasvc.shards import ingest, open_dataset
from tests.loaders.decode_sharing.job import OPTIONS, describe, endless

ROOT = Path(__file__).parents[3]
JOB = Path(__file__).with_name("job.py")


@pytest.fixture
def name():
    """A decode group of this test alone; whatever it started is gone at its end, and nobody listens."""
    name = f"test-{secrets.token_hex(8)}"
    yield name
    assert not is_listening(name)


def is_listening(name):
    address = address_of(name, DataRanks())
    return address[1:] in Path("/proc/net/unix").read_text()


def make(split, group, **options):
    return ImageLoader(split, decode_group=group, **{**OPTIONS, **options})


def take(loader, count):
    stream = endless(loader)
    return [describe(next(stream)) for _ in range(count)]


@pytest.fixture(scope="module")
def alone(digits):
    """What a job that shares nothing gets: over two epochs of `val`, of 45 steps each."""
    with ImageLoader(digits["val"], **OPTIONS) as loader:
        return take(loader, 90)


class Job:
    """A process of `job.py`, or of another script that takes the same commands."""

    def __init__(self, split, group, script=JOB, cwd=None, **options):
        settings = {"decode_group": group if isinstance(group, dict) else {"name": group}, **options}
        self.process = subprocess.Popen(
            [sys.executable, script, split.repository.url, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=cwd,
        )

    def tell(self, *command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self):
        return json.loads(self.process.stdout.readline())

    def do(self, *command):
        self.tell(*command)
        return self.hear()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


class Server:
    """The decoding process of a decode group, seen from outside; leaving the block waits until it is gone."""

    def __init__(self, pid):
        self.pid = pid
        self.descriptor = os.pidfd_open(pid)

    def __enter__(self):
        return self

    def wait(self):
        assert select.select([self.descriptor], [], [], 30)[0], "the decoding process lives on"

    def __exit__(self, kind, *_):
        if kind is None:
            self.wait()
        os.close(self.descriptor)


def test_jobs_get_the_batches_of_a_job_alone_and_each_is_decoded_once(digits, alone, name):
    with ExitStack() as stack:
        jobs = [stack.enter_context(Job(digits["val"], name)) for _ in range(3)]
        first = [job.do("take", 1) for job in jobs]
        server = stack.enter_context(Server(jobs[0].do("status")["pid"]))
        # In turns of a few: one that falls far behind is waited for, and batches are decoded again for it.
        taken = [list(begun) for begun in first]
        for _ in range(16):
            for job in jobs:
                job.tell("take", 3)
            for job, batches in zip(jobs, taken, strict=True):
                batches.extend(job.hear())
        assert taken == [alone[:49]] * 3
        counts = [job.do("counts") for job in jobs]
        assert [(each["shared"], each["alone"], each["lost"]) for each in counts] == [(49, 0, 0)] * 3
        status = jobs[0].do("status")
        # Beyond what was taken: two that each prefetches, and two ahead of the fastest, with one under way.
        assert (status["pid"], 49 <= status["decoded"] <= 54) == (server.pid, True)
        for job in jobs:
            job.process.stdin.close()
            assert job.process.wait(30) == 0


@pytest.mark.slow
def test_torch_batches_are_shared_bit_for_bit_whatever_their_type_and_layout(digits, name):
    import torch

    options = {"output": "bfloat16", "layout": "NHWC", "columns": ["width"], "tail": "short", "batch_size": 100}
    with ImageLoader(digits["val"], **{**OPTIONS, **options}) as own, make(digits["val"], name, **options) as loader:
        for expected, found in zip(own, loader, strict=True):
            assert found.images.stride() == expected.images.stride()
            assert torch.equal(found.images, expected.images)
            assert torch.equal(found.labels, expected.labels)
            assert torch.equal(found.mask, expected.mask)
            assert torch.equal(found.columns["width"], expected.columns["width"])
            assert found.positions.tolist() == expected.positions.tolist()
        assert loader.sharing.counts.shared == 4
        server = Server(loader.sharing.status()["pid"])
    server.wait()


def join_again(loader):
    """Take batches from a loader that lost its server until it has joined the next, and return them."""
    batches = loader.sharing._batches
    asked = take(loader, 1)
    while not batches._has_joined:
        assert batches._connection is not None, "nobody starts the server"
        assert select.select([batches._connection], [], [], 30)[0]
        asked += take(loader, 1)
    return asked


def test_a_killed_server_costs_no_batch_and_is_started_again(digits, alone, name):
    with make(digits["val"], name) as first, make(digits["val"], name) as second, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaders = [first, second]
        found = [take(loader, 5) for loader in loaders]
        with Server(first.sharing.status()["pid"]) as server:
            os.kill(server.pid, signal.SIGKILL)
        for loader, batches in zip(loaders, found, strict=True):
            batches.extend(take(loader, 5))
        for loader, batches in zip(loaders, found, strict=True):
            batches.extend(join_again(loader))
        shared = [loader.sharing.counts.shared for loader in loaders]
        for loader, batches in zip(loaders, found, strict=True):
            batches.extend(take(loader, 10))
            assert batches == alone[: len(batches)]
        assert [loader.sharing.counts.lost for loader in loaders] == [1, 1]
        assert all(loader.sharing.counts.shared > before + 5 for loader, before in zip(loaders, shared, strict=True))
        status = first.sharing.status()
        assert status["pid"] != server.pid
        assert second.sharing.status()["pid"] == status["pid"]
        again = Server(status["pid"])
    again.wait()


def test_a_server_killed_between_a_pending_reply_and_its_batch_is_missed_by_nobody(digits, alone, name):
    with make(digits["val"], DecodeGroup(name, lag=30)) as loader:
        assert take(loader, 1) == alone[:1]
        batches = loader.sharing._batches
        far = Cursor(0, 8 * 30)
        assert batches.request(far)
        with Server(loader.sharing.status()["pid"]) as server:
            os.kill(server.pid, signal.SIGKILL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            missed = batches.take(far)
            assert missed is None or describe(missed) == alone[30]
            assert take(loader, 10) == alone[1:11]
            join_again(loader)
        server = Server(loader.sharing.status()["pid"])
    server.wait()


def test_a_killed_job_even_the_one_that_started_the_server_disturbs_nobody(digits, alone, name):
    with Job(digits["val"], name) as starter, make(digits["val"], name) as other:
        starter.do("take", 3)
        pid = starter.do("status")["pid"]
        batches = endless(other)
        found = [describe(next(batches)) for _ in range(2)]
        starter.tell("take", 5)
        starter.kill()
        found += [describe(next(batches)) for _ in range(48)]
        assert found == alone[:50]
        counts = other.sharing.counts
        assert (counts.shared, counts.alone, counts.lost) == (50, 0, 0)
        assert other.sharing.status()["pid"] == pid
        server = Server(pid)
    server.wait()


def test_a_stopped_job_blocks_nobody_is_told_and_gets_its_own_batches(digits, alone, name):
    group = {"name": name, "lag": 2, "patience": 0}
    with Job(digits["val"], group) as slow, make(digits["val"], DecodeGroup(**group)) as fast:
        # One, so that the first batch is still kept when the other asks for it, however late that is.
        found = slow.do("take", 1)
        slow.process.send_signal(signal.SIGSTOP)
        slow.tell("take", 20)
        assert take(fast, 40) == alone[:40]
        assert fast.sharing.counts.alone == 0
        slow.process.send_signal(signal.SIGCONT)
        assert found + slow.hear() == alone[:21]
        counts = slow.do("counts")
        # Two were promised before it was stopped; after them it asks for number 3 where the fastest is beyond 40.
        assert (counts["behind"], counts["shared"] >= 3, counts["alone"] >= 4, counts["lost"]) == (1, True, True, 0)
        assert counts["last_behind"] > 10
        server = Server(fast.sharing.status()["pid"])
        slow.kill()
    server.wait()


def test_a_mixture_is_shared_as_a_split_is(digits, name):
    mixture = Mixture([(digits["train"], 3), (digits["val"], 1)], epoch_samples=64, block=16)

    def describe_sources(loader, count):
        return [(batch.sources.tolist(), *describe(batch)) for batch in itertools.islice(endless(loader), count)]

    with ImageLoader(mixture, **OPTIONS) as loader:
        alone = describe_sources(loader, 10)
    with make(mixture, name) as first, make(mixture, name) as second:
        for loader in (first, second):
            assert describe_sources(loader, 10) == alone
            assert (loader.sharing.counts.shared, loader.sharing.counts.alone) == (10, 0)
        server = Server(first.sharing.status()["pid"])
    server.wait()


def test_the_wait_for_the_process_that_decodes_is_a_wait_and_no_work_of_the_job(digits, name):
    with make(digits["val"], name) as loader:
        take(loader, 5)
        report = loader.report()
        assert report.totals.waiting_s.keys() == {Stage.DECODE}
        assert 0 < report.totals.waiting_s[Stage.DECODE] <= report.totals.blocked_s[Stage.DECODE]
        assert "one process decodes for all jobs of the decode group" in str(report.bottleneck)
        server = Server(loader.sharing.status()["pid"])
    server.wait()


def test_who_starts_late_is_waited_for_and_shares_from_then_on(digits, alone, name):
    group = DecodeGroup(name, lag=2, patience=50)
    with make(digits["val"], group) as first:
        early = endless(first)
        found = [describe(next(early)) for _ in range(20)]
        with make(digits["val"], group) as second:
            late = [describe(batch) for batch, _ in zip(endless(second), range(20), strict=False)]
            for _ in range(10):
                found.append(describe(next(early)))
            assert (found, late) == (alone[:30], alone[:20])
            assert (second.sharing.counts.alone, first.sharing.counts.alone) == (0, 0)
            server = Server(first.sharing.status()["pid"])
    server.wait()


def test_who_is_too_far_behind_is_warned_or_gets_an_error_as_asked(digits, alone, name):
    with make(digits["val"], DecodeGroup(name, lag=2, patience=0)) as first:
        stream = endless(first)
        for _ in range(20):
            next(stream)
        with make(digits["val"], DecodeGroup(name, lag=2, patience=0, when_behind="raise")) as second:
            with pytest.raises(LagError, match=r"2\d batches behind the fastest"):
                take(second, 1)
            second.load_state_dict(first.state_dict())
            assert take(second, 1) == [describe(next(stream))] == alone[20:21]
        with make(digits["val"], DecodeGroup(name, lag=2, patience=0)) as third:
            with pytest.warns(RuntimeWarning, match="batches behind the fastest; this job decodes alone"):
                assert take(third, 3) == alone[:3]
            assert (third.sharing.counts.alone, third.sharing.counts.behind) == (3, 1)
        server = Server(first.sharing.status()["pid"])
    server.wait()


@pytest.mark.slow
def test_a_job_that_is_left_alone_elsewhere_takes_the_server_with_it(digits, alone, name):
    group = DecodeGroup(name, lag=2, patience=0)
    with make(digits["val"], group) as first, make(digits["val"], group) as second:
        take(first, 20)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            late = endless(second)
            assert [describe(next(late)) for _ in range(2)] == alone[:2]
        first.close()
        assert [describe(next(late)) for _ in range(20)] == alone[2:22]
        assert second.sharing.counts.shared >= 15
        server = Server(second.sharing.status()["pid"])
    server.wait()


@pytest.mark.slow
def test_a_state_loaded_in_between_gives_exactly_the_rest(digits, alone, name):
    with make(digits["val"], name) as first, make(digits["val"], name) as second:
        take(first, 5)
        state = first.state_dict()
        assert take(first, 7) == alone[5:12]
        first.load_state_dict(state)
        assert take(first, 7) == alone[5:12]
        second.load_state_dict(state)
        assert take(second, 45) == alone[5:50]
        server = Server(second.sharing.status()["pid"])
    server.wait()


@pytest.mark.slow
def test_jobs_resumed_at_an_odd_position_share_too(digits, name):
    with ImageLoader(digits["val"], **OPTIONS) as own:
        state = own.state_dict() | {"position": 13}
        own.load_state_dict(state)
        expected = take(own, 60)
    with make(digits["val"], name) as first, make(digits["val"], name) as second:
        first.load_state_dict(state)
        second.load_state_dict(state)
        streams = [endless(first), endless(second)]
        for each in expected:
            assert [describe(next(stream)) for stream in streams] == [each, each]
        assert (first.sharing.counts.alone, second.sharing.counts.alone) == (0, 0)
        server = Server(first.sharing.status()["pid"])
    server.wait()


def test_batches_that_are_kept_stay_as_they_are_and_those_of_a_closed_loader_too(digits, alone, name):
    with make(digits["val"], name) as loader:
        batches = endless(loader)
        kept = [next(batches) for _ in range(30)]
        server = Server(loader.sharing.status()["pid"])
    server.wait()
    assert [describe(batch) for batch in kept] == alone[:30]


def test_what_one_job_writes_into_a_batch_no_other_sees(digits, alone, name):
    with make(digits["val"], name) as first, make(digits["val"], name) as second:
        one, other = endless(first), endless(second)
        for expected in alone[:20]:
            batch = next(one)
            assert describe(batch) == expected
            batch.images[...] = 0
            batch.labels[...] = -1
            assert describe(next(other)) == expected
        server = Server(first.sharing.status()["pid"])
    server.wait()


def test_other_settings_under_the_same_name_are_refused_with_both(digits, name):
    with make(digits["val"], name) as first:
        take(first, 1)
        for options, said in [
            ({"batch_size": 4}, "batch_size is 4 here and 8 there"),
            ({"seed": 3}, "seed is 3 here and 0 there"),
            ({"output": "float32"}, "output is 'float32' here and 'uint8' there"),
        ]:
            with make(digits["val"], name, **options) as other, pytest.raises(ConfigError, match=said):
                take(other, 1)
        with make(digits["train"], name) as other, pytest.raises(ConfigError, match="version is"):
            take(other, 1)
        with make(digits["val"], name) as other, pytest.raises(ConfigError, match="'torch' here and 'numpy' there"):
            next(iter(other))
        with make(digits["val"], name, num_threads=2, prefetch=3) as other:  # these change nothing in a batch
            take(other, 1)
        server = Server(first.sharing.status()["pid"])
    server.wait()


@pytest.mark.slow
def test_every_data_rank_has_a_server_of_its_own(digits, name):
    ranks = [{"data_rank": rank, "data_world_size": 2} for rank in range(2)]
    with make(digits["val"], name, **ranks[0]) as first, make(digits["val"], name, **ranks[1]) as second:
        served = [position for loader in (first, second) for position in take(loader, 1)[0][1]]
        assert sorted(served) == list(range(16))
        servers = [Server(loader.sharing.status()["pid"]) for loader in (first, second)]
    for server in servers:
        server.wait()


@pytest.mark.slow
def test_the_cache_of_the_node_is_read_by_the_server(digits, alone, name, tmp_path):
    with Cache(tmp_path / "cache", budget="10MB") as cache, make(digits["val"], name, cache=cache) as loader:
        assert take(loader, 10) == alone[:10]
        assert cache.status().resident_bytes > 0
        server = Server(loader.sharing.status()["pid"])
    server.wait()


@pytest.mark.slow
def test_a_sample_that_does_not_decode_is_named_to_whoever_meets_it(repository, folder, name):
    from tests.samples import jpeg

    photo = bytearray(jpeg(seed=1))
    table = photo.index(b"\xff\xc4")
    photo[table + 5 : table + 21] = b"\xff" * 16  # a Huffman table that cannot be; header and end look right
    (folder / "train" / "b" / "bad.jpg").write_bytes(photo)
    ingest(repository, str(folder), "pets")
    split = open_dataset(repository, "pets")["train"]
    options = {"batch_size": 3, "shuffle": None, "tail": "short"}
    with make(split, name, **options) as first, make(split, name, **options) as second:
        for loader in (first, second):
            with pytest.raises(BadSampleError, match=r"'b/bad\.jpg'"):
                take(loader, 7)
        failed_at = first.state_dict()["position"]
        for loader in (first, second):
            loader.load_state_dict({**loader.state_dict(), "position": failed_at + 3})
            assert take(loader, 1)[0][1][0] == failed_at + 3
        server = Server(first.sharing.status()["pid"])
    server.wait()
    with make(split, name, on_bad="mask", **options) as loader:
        assert sum(len(batch.bad) for batch in loader.numpy()) == loader.num_bad == 1
        assert loader.sharing.counts.alone == 0
        server = Server(loader.sharing.status()["pid"])
    server.wait()


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_given_up(digits, alone, name):
    with make(digits["val"], DecodeGroup(name, silent_s=0.2)) as loader:
        batches = endless(loader)
        while not loader.sharing.counts.shared:  # a slow start, too, may look like silence
            loader.close()
            loader.load_state_dict(loader.state_dict() | {"epoch": 0, "position": 0})
            batches = endless(loader)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = [describe(next(batches))]
        pid = loader.sharing.status()["pid"]
        server = Server(pid)
        os.kill(pid, signal.SIGSTOP)
        with pytest.warns(RuntimeWarning, match="the decoding process was lost"):
            found += [describe(next(batches)) for _ in range(10)]
        assert found == alone[:11]
        os.kill(pid, signal.SIGCONT)
    server.wait()


@pytest.mark.slow
def test_a_forked_child_keeps_no_server_alive_and_breaks_nothing(digits, alone, name):
    with make(digits["val"], name) as loader:
        found = take(loader, 2)
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(writing)
            os.read(reading, 1)  # until the parent is done
            os._exit(0)
        os.close(reading)
        found += take(loader, 3)
        server = Server(loader.sharing.status()["pid"])
    server.wait()
    os.close(writing)
    os.waitpid(child, 0)
    assert found == alone[:5]


@pytest.mark.slow
def test_a_server_whose_starter_is_gone_before_it_is_up_ends_by_itself(digits, name):
    spec = LoaderSpec(ImageLoader, digits["val"], None, OPTIONS)
    job = ServerJob.plan(DecodeGroup(name), spec=spec, step_index=StepIndex(360, 8, "drop"), fingerprint={})
    connection, listener = connect_or_listen(address_of(name, DataRanks()), 30)
    with connection, listener:
        server = Server(start_server(job, listener))
    server.wait()


def test_of_many_that_come_at_once_one_starts_the_server(name):
    address = address_of(name, DataRanks())
    found = [connect_or_listen(address, 30) for _ in range(8)]
    listeners = [listener for _, listener in found if listener is not None]
    assert len(listeners) == 1
    for each in (*listeners, *(connection for connection, _ in found)):
        each.close()
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
        late.connect(address)


@pytest.mark.slow
def test_where_the_server_cannot_make_the_loader_everybody_decodes_alone(digits, alone, name, tmp_path):
    cache = Cache(tmp_path / "cache", budget="10MB")
    with cache, make(digits["val"], name, cache=cache) as loader:
        loader.sharing._cache = type(
            "Gone", (), {"folder": Path("/proc/nowhere"), "tenant": "default", "peers": None}
        )
        loader.sharing._make_alone = lambda: ImageLoader(digits["val"], **OPTIONS)
        with pytest.warns(RuntimeWarning, match="nowhere"):
            assert take(loader, 5) == alone[:5]
        assert loader.sharing.counts.alone == 5
        server = Server(loader.sharing.status()["pid"])
    server.wait()


def test_transforms_of_a_module_beside_the_script_are_found_and_nothing_of_the_working_directory(
    digits, name, tmp_path
):
    beside, cwd = tmp_path / "beside", tmp_path / "cwd"
    beside.mkdir()
    cwd.mkdir()
    (beside / "own_transforms.py").write_text("def invert(pixels, generator):\n    return 255 - pixels\n")
    script = beside / "train.py"
    script.write_text(
        "from own_transforms import invert\n"
        "from tests.loaders.decode_sharing.job import main\n"
        "main(transform=invert)\n"
    )
    (cwd / "json.py").write_text("open('was_run', 'w').close()\n")
    with Job(digits["val"], name, script, cwd) as job:
        job.do("take", 5)
        counts = job.do("counts")
        assert (counts["shared"], counts["alone"], counts["lost"]) == (5, 0, 0)
        assert not (cwd / "was_run").exists()
        server = Server(job.do("status")["pid"])
    server.wait()


@contextmanager
def no_more_files():
    """No file can be opened by this process inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("has_arrived", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_who_can_open_no_more_files_decodes_alone(digits, alone, name, has_arrived):
    with make(digits["val"], DecodeGroup(name, lag=30)) as loader:
        assert take(loader, 1) == alone[:1]
        batches = loader.sharing._batches
        far = Cursor(0, 8 * 20)
        assert batches.request(far)
        if has_arrived:
            while far not in batches._arrived:
                batches._receive()
        server = Server(loader.sharing.status()["pid"])
        with pytest.warns(RuntimeWarning, match="Too many open files"), no_more_files():
            assert batches.take(far) is None
        server.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert take(loader, 10) == alone[1:11]
            join_again(loader)
        server = Server(loader.sharing.status()["pid"])
    server.wait()


def test_an_answer_that_was_interrupted_is_not_taken_for_that_to_the_next_question(digits, name, monkeypatch):
    def interrupted(connection):
        raise KeyboardInterrupt

    with make(digits["val"], name) as first, make(digits["val"], name) as second:
        take(first, 1)
        take(second, 1)
        batches = second.sharing._batches
        for question in (lambda: batches.request(Cursor(0, 8)), batches.status):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(consumer, "receive", interrupted)
                question()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert not batches.request(Cursor(0, 3))  # no step that the first comes to
            assert batches.request(Cursor(0, 8))
        assert second.sharing.counts.lost == 0
        server = Server(first.sharing.status()["pid"])
    server.wait()


@pytest.mark.parametrize("fate", [pytest.param(signal.SIGCONT, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_name_is_free_for_other_settings_as_soon_as_nobody_uses_it(digits, name, monkeypatch, fate):
    with make(digits["val"], name) as first:
        take(first, 1)
        server = Server(first.sharing.status()["pid"])
        first.sharing._batches.cancel()  # so that closing waits for no answer
        os.kill(server.pid, signal.SIGSTOP)  # it has not seen yet that the first is gone when the second comes
    fates = [fate]

    def send_and_go_on(connection, message):
        send(connection, message)
        if fates:
            os.kill(server.pid, fates.pop())

    with make(digits["val"], name, seed=3) as second:
        monkeypatch.setattr(consumer, "send", send_and_go_on)
        take(second, 5)
        counts = second.sharing.counts
        assert (counts.shared, counts.alone, counts.lost) == (5, 0, 0)
        server.wait()
        server = Server(second.sharing.status()["pid"])
    server.wait()


def test_messages_that_make_no_sense_end_whoever_sent_them_alone(digits, alone, name):
    with make(digits["val"], name) as loader:
        assert take(loader, 5) == alone[:5]
        join = {"type": "join", "fingerprint": loader.sharing._batches._job.fingerprint}
        for message in (
            [],
            {"type": "join"},
            {"type": "release"},
            {"type": "release", "numbers": 3},
            {"type": "request", "cursor": 3},
            {"type": "request", "cursor": ["a", "b"]},
        ):
            connection, _ = connect_or_listen(address_of(name, DataRanks()), 30)
            with connection:
                send(connection, join)
                assert receive(connection)[0]["type"] == "joined"
                send(connection, message)
                assert receive(connection) is None
        assert take(loader, 5) == alone[5:10]
        assert loader.sharing.counts.lost == 0
        server = Server(loader.sharing.status()["pid"])
    server.wait()


def test_a_loan_to_a_consumer_that_has_just_gone_is_none(digits, name):
    spec = LoaderSpec(ImageLoader, digits["val"], None, OPTIONS)
    job = ServerJob.plan(DecodeGroup(name), spec=spec, step_index=StepIndex(360, 8, "drop"), fingerprint={})
    connection, listener = connect_or_listen(address_of(name, DataRanks()), 30)
    with connection, listener:
        server = ServerInside(job, listener)
        slot = server._slots.add(Cursor(0, 0), SharedBuffer(64), [])
        server._lend(Consumer(connection), slot)
        assert not slot.holders.total()
        server._slots.drop(slot)


def test_a_loader_that_would_push_out_jobs_of_its_own_pace_is_refused(digits, name):
    with pytest.raises(ConfigError, match=r"prefetch is 7, more than the lag of 6"):
        make(digits["val"], name, prefetch=7)
    make(digits["val"], name, prefetch=6).close()


def test_what_cannot_be_sent_to_another_process_is_refused(digits, name):
    with make(digits["val"], name, transform=lambda pixels, generator: pixels) as loader:  # noqa: SIM117
        with pytest.raises(ConfigError, match="cannot send the loader's settings"):
            take(loader, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": ""}, "1 to 50 bytes"),
        ({"name": "x" * 51}, "1 to 50 bytes"),
        ({"name": "x", "lag": 0}, "lag is 0"),
        ({"name": "x", "patience": -1}, "patience is -1"),
        ({"name": "x", "when_behind": "wait"}, "when_behind is 'wait'"),
        ({"name": "x", "silent_s": 0}, "silent_s is 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        DecodeGroup(**settings)


def test_a_decode_group_needs_the_cpu(digits):
    with pytest.raises(ConfigError, match="give device='cpu'"):
        make(digits["val"], "x", device="cuda:0")
