"""Jobs that share their decoding: real processes, real memory, and every way in which one of them may go."""

import contextlib
import itertools
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from datasvc.errors import BadSampleError, ConfigError, LagError
from datasvc.loaders import AugmentConfig, DecodeConfig, ImageLoader, PixelFormat
from datasvc.loaders.core.batches import Cursor
from datasvc.loaders.core.mixture import Mixture
from datasvc.loaders.decode_sharing import DecodeGroup
from datasvc.loaders.decode_sharing.group_folder import GroupFolder, PendingStep
from datasvc.loaders.decode_sharing.membership import folder_of
from datasvc.loaders.profiling.step_times import Stage
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.shards import ingest, open_dataset
from tests.loaders.decode_sharing.job import OPTIONS, describe, endless

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent


@pytest.fixture
def name():
    """A decode group of this test alone; at its end nothing of it is left."""
    name = f"test-{secrets.token_hex(8)}"
    yield name
    assert not folder_of(name, DataRanks()).exists()


def make(split, group, **options):
    return ImageLoader(split, decode_group=group, **{**OPTIONS, **options})


def take(loader, count):
    return [describe(batch) for batch in itertools.islice(endless(loader), count)]


def counts_of(*loaders):
    return [(loader.sharing.counts.shared, loader.sharing.counts.decoded) for loader in loaders]


@pytest.fixture(scope="module")
def alone(digits):
    """What a job that shares nothing gets: over two epochs of `val`, of 45 steps each."""
    with ImageLoader(digits["val"], **OPTIONS) as loader:
        return take(loader, 90)


class Process:
    """A process of one of the scripts beside this file."""

    def __init__(self, script, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, HERE / script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
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


def job(split, group, **options):
    settings = {"decode_group": group if isinstance(group, dict) else {"name": group}, **options}
    return Process("job.py", split.repository.url, json.dumps(settings))


def steps_of(*steps):
    return [Cursor(0, OPTIONS["batch_size"] * step) for step in steps]


@contextmanager
def claimer(loader, *steps, forks=False):
    """A process of a loader's group that never finishes the steps that it decodes."""
    folder = loader.sharing._folder._membership
    positions = [str(cursor.position) for cursor in steps_of(*steps)]
    with Process("claimer.py", folder.name, folder.settings.decode(), str(int(forks)), *positions) as process:
        assert process.process.stdout.readline() == "claimed\n"
        yield process


@contextmanager
def claims(loader, *steps):
    """A member of a loader's group that does not finish the steps that it decodes before the block ends."""
    folder = loader.sharing._folder._membership
    other = GroupFolder(folder.name, DataRanks(), json.loads(folder.settings))
    other.join()
    assert [other.find_or_claim(cursor) for cursor in steps_of(*steps)] == [None] * len(steps)
    try:
        yield other
    finally:
        other.leave()


@pytest.mark.slow
def test_jobs_get_the_batches_of_a_job_alone_and_each_is_decoded_once(digits, alone, name):
    with ExitStack() as stack:
        jobs = [stack.enter_context(job(digits["val"], name)) for _ in range(3)]
        taken = [job.do("take", 1) for job in jobs]
        for _ in range(16):
            for each in jobs:
                each.tell("take", 3)
            for each, batches in zip(jobs, taken, strict=True):
                batches.extend(each.hear())
        assert taken == [alone[:49]] * 3
        counts = [each.do("counts") for each in jobs]
        assert [each["shared"] + each["decoded"] for each in counts] == [49] * 3
        assert (sum(each["decoded"] for each in counts), [each["lost"] for each in counts]) == (49, [0] * 3)
        for each in jobs:
            each.process.stdin.close()
            assert each.process.wait(30) == 0


@pytest.mark.slow
def test_torch_batches_are_shared_bit_for_bit_whatever_their_type_and_layout(digits, name):
    import torch

    options = {
        "columns": ["width"],
        "tail": "short",
        "batch_size": 100,
        "pixels": PixelFormat(output="bfloat16", layout="NHWC"),
    }
    own = ImageLoader(digits["val"], **{**OPTIONS, **options})
    with own, make(digits["val"], name, **options) as first, make(digits["val"], name, **options) as second:
        for expected, *others in zip(own, first, second, strict=True):
            for found in others:
                assert found.images.stride() == expected.images.stride()
                assert torch.equal(found.images, expected.images)
                assert torch.equal(found.labels, expected.labels)
                assert torch.equal(found.mask, expected.mask)
                assert torch.equal(found.columns["width"], expected.columns["width"])
                assert found.positions.tolist() == expected.positions.tolist()
        assert sum(decoded for _, decoded in counts_of(first, second)) == 4


@pytest.mark.slow
def test_a_job_killed_while_it_decodes_costs_no_batch(digits, alone, name, monkeypatch):
    wait, is_killed = PendingStep.wait, []
    with make(digits["val"], name) as loader:
        assert take(loader, 1) == alone[:1]
        # Of the steps after those that are prefetched: the first one is missed before the kill, the second one after.
        with claimer(loader, 4, 5) as other:

            def kill_and_wait(pending, timeout_s):
                other.kill()
                is_killed.append(wait(pending, timeout_s))
                return is_killed[-1]

            monkeypatch.setattr(PendingStep, "wait", kill_and_wait)
            assert take(loader, 20) == alone[1:21]
        assert is_killed == [True]
        assert counts_of(loader) == [(0, 21)]
        assert loader.sharing.counts.lost == 0


@pytest.mark.slow
def test_a_forked_child_does_not_hide_that_its_parent_was_killed(digits, alone, name):
    with make(digits["val"], name) as loader:
        take(loader, 1)
        with claimer(loader, 10, forks=True) as other:
            with loader.sharing._folder.find(*steps_of(10)) as pending:
                assert not pending.wait(0)
                other.kill()
                assert pending.wait(60)
            assert take(loader, 20) == alone[1:21]
            assert loader.sharing.counts.lost == 0


@pytest.mark.slow
def test_a_job_killed_after_it_decoded_disturbs_nobody(digits, alone, name):
    with job(digits["val"], name) as starter, make(digits["val"], name) as other:
        starter.do("take", 3)
        found = take(other, 2)
        starter.tell("take", 5)
        starter.kill()
        found += take(other, 48)
        assert found == alone[:50]
        assert other.sharing.counts.lost == 0
        assert sum(counts_of(other)[0]) == 50


def test_a_silent_job_is_waited_for_once_and_not_for_ever(digits, alone, name):
    with make(digits["val"], DecodeGroup(name, silent_s=0.01)) as loader:
        found = take(loader, 1)
        said = r"did not finish a batch for 0\.01 s; this job decodes"
        with claims(loader, 4, 5, 6) as other:
            with pytest.warns(RuntimeWarning, match=said) as warned:
                found += take(loader, 30)
            assert (found, len(warned), loader.sharing.counts.lost) == (alone[:31], 1, 1)
            for cursor in steps_of(4, 5, 6):
                other.publish(cursor, "too late")
            loader.load_state_dict(loader.state_dict() | {"epoch": 0, "position": 32})
            assert take(loader, 3) == alone[4:7]


@pytest.mark.slow
def test_a_job_that_was_stopped_gets_its_own_batches(digits, alone, name):
    group = {"name": name, "lag": 2, "patience": 0, "silent_s": 0.01}
    with job(digits["val"], group) as slow, make(digits["val"], DecodeGroup(**group)) as fast:
        found = slow.do("take", 1)
        slow.process.send_signal(signal.SIGSTOP)
        slow.tell("take", 20)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert take(fast, 40) == alone[:40]
        slow.process.send_signal(signal.SIGCONT)
        assert found + slow.hear() == alone[:21]
        counts = slow.do("counts")
        # Two were begun before it was stopped; after them it asks for number 3 where the fastest is beyond 40.
        assert (counts["behind"], counts["decoded"] >= 4) == (1, True)
        assert counts["last_behind"] > 10
        slow.kill()


def test_a_mixture_is_shared_as_a_split_is(digits, name):
    mixture = Mixture([(digits["train"], 3), (digits["val"], 1)], epoch_samples=64, block=16)

    def describe_sources(loader, count):
        return [(batch.sources.tolist(), *describe(batch)) for batch in itertools.islice(endless(loader), count)]

    with ImageLoader(mixture, **OPTIONS) as loader:
        alone = describe_sources(loader, 10)
    with make(mixture, DecodeGroup(name, lag=20)) as first, make(mixture, DecodeGroup(name, lag=20)) as second:
        for loader in (first, second):
            assert describe_sources(loader, 10) == alone
        assert counts_of(first, second) == [(0, 10), (10, 0)]


def test_the_wait_for_a_batch_is_a_wait_and_no_work_of_the_job(digits, name):
    with make(digits["val"], name) as loader:
        take(loader, 5)
        report = loader.report()
        assert report.totals.waiting_s.keys() == {Stage.DECODE}
        assert 0 < report.totals.waiting_s[Stage.DECODE] <= report.totals.blocked_s[Stage.DECODE]
        assert "the jobs of the decode group decode in turn" in str(report.bottleneck)


def test_who_starts_late_shares_as_soon_as_it_has_caught_up(digits, alone, name):
    group = DecodeGroup(name, lag=2, patience=50)
    with make(digits["val"], group) as first, warnings.catch_warnings():
        warnings.simplefilter("error")
        early = endless(first)
        found = [describe(next(early)) for _ in range(20)]
        with make(digits["val"], group) as second:
            late = endless(second)
            assert [describe(next(late)) for _ in range(20)] == alone[:20]
            begun = sum(decoded for _, decoded in counts_of(first, second))
            for expected in alone[20:30]:
                assert [describe(next(stream)) for stream in (early, late)] == [expected] * 2
            # Those from where the late one began, and each of the ten once.
            assert sum(decoded for _, decoded in counts_of(first, second)) == begun + 10
            assert second.sharing.counts.behind == 0
    assert found == alone[:20]


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
            with pytest.warns(RuntimeWarning, match="batches behind the fastest; it decodes alone"):
                assert take(third, 3) == alone[:3]
            assert (third.sharing.counts.decoded, third.sharing.counts.behind) == (3, 1)


def test_a_state_loaded_in_between_gives_exactly_the_rest(digits, alone, name):
    with make(digits["val"], name) as first, make(digits["val"], name) as second:
        take(first, 5)
        state = first.state_dict()
        assert take(first, 7) == alone[5:12]
        first.load_state_dict(state)
        assert take(first, 7) == alone[5:12]
        second.load_state_dict(state)
        assert take(second, 45) == alone[5:50]


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
        assert sum(decoded for _, decoded in counts_of(first, second)) == 60


def test_batches_that_are_kept_stay_as_they_are_when_all_jobs_have_left(digits, alone, name):
    with make(digits["val"], name) as first, make(digits["val"], name) as second:
        kept = []
        for one, other in itertools.islice(zip(endless(first), endless(second), strict=True), 30):
            kept += [one, other]
        assert sum(shared for shared, _ in counts_of(first, second)) == 30
    assert [describe(batch) for batch in kept] == [each for each in alone[:30] for _ in range(2)]


def test_what_one_job_writes_into_a_batch_no_other_sees(digits, alone, name):
    with make(digits["val"], name) as first, make(digits["val"], name) as second:
        one, other = endless(first), endless(second)
        for expected in alone[:20]:
            for stream in (one, other):
                batch = next(stream)
                assert describe(batch) == expected
                batch.images[...] = 0
                batch.labels[...] = -1


def shared_buffers() -> int:
    """Count the descriptors of shared batches: other threads of this process open and close files of their own."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            count += os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:datasvc-decode")
    return count


def test_memory_is_bounded_and_given_back(digits, name):
    before = shared_buffers()
    with make(digits["val"], DecodeGroup(name, lag=4)) as loader:
        take(loader, 80)
        assert shared_buffers() > before
        folder = loader.sharing._folder
        # The step of the last request, as many behind it as the lag, and the link of the job itself.
        assert len(list(folder._membership.path.iterdir())) <= 4 + 1 + 2 + 1
        assert len(folder._published) + len(folder._spare) <= 4 + 1 + 4
    assert shared_buffers() <= before


def test_the_memory_of_a_dropped_batch_is_used_for_the_next_one(name):
    with ExitStack() as stack:
        writer, reader = (GroupFolder(name, DataRanks(), {}) for _ in range(2))
        for folder in (writer, reader):
            folder.join()
            stack.callback(folder.leave)
        buffers = set()
        for cursor in steps_of(*range(20)):
            assert writer.find_or_claim(cursor) is None
            writer.publish(cursor, np.full(1000, cursor.position))
            assert reader.find(cursor).tolist() == [cursor.position] * 1000
            buffers.add(os.fstat(writer._published[cursor].descriptor).st_ino)
            writer.retire(lambda kept, newest=cursor: kept == newest)
        assert len(buffers) == 2  # one for the batch that is kept, one for the next


def test_other_settings_under_the_same_name_are_refused_with_both(digits, name):
    with make(digits["val"], name) as first:
        take(first, 1)
        for options, said in [
            ({"batch_size": 4}, "batch_size is 4 here and 8 there"),
            ({"seed": 3}, "seed is 3 here and 0 there"),
            ({"pixels": "float32"}, "pixels is .*'float32'.* here and .*'uint8'.* there"),
        ]:
            with make(digits["val"], name, **options) as other, pytest.raises(ConfigError, match=said):
                take(other, 1)
        with make(digits["train"], name) as other, pytest.raises(ConfigError, match="version is"):
            take(other, 1)
        with make(digits["val"], name) as other, pytest.raises(ConfigError, match="'torch' here and 'numpy' there"):
            next(iter(other))
        with make(digits["val"], DecodeGroup(name, lag=9)) as other, pytest.raises(ConfigError, match="lag is 9"):
            take(other, 1)
        with make(
            digits["val"], name, decode=DecodeConfig(num_threads=2, prefetch=3)
        ) as other:  # these change nothing in a batch
            take(other, 1)


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_name_is_free_for_other_settings_as_soon_as_nobody_uses_it(digits, name, is_killed):
    with ExitStack() as stack:
        if is_killed:
            other = stack.enter_context(job(digits["val"], name))
            other.do("take", 5)
            other.kill()
        else:
            with make(digits["val"], name) as first:
                take(first, 5)
        with make(digits["val"], name, seed=3) as second:
            take(second, 5)
            assert counts_of(second) == [(0, 5)]
            assert second.sharing.counts.lost == 0


def test_what_killed_jobs_leave_is_no_memory_and_is_removed_by_the_next_job_of_any_group(digits, name):
    other = f"{name}-other"
    with job(digits["val"], other) as killed:
        killed.do("take", 5)
        killed.kill()
    left = folder_of(other, DataRanks())
    assert [link for link in left.iterdir() if link.exists() or not link.is_symlink()] == []
    with make(digits["val"], name) as loader:
        take(loader, 1)
        assert not left.exists()


def test_every_data_rank_shares_with_its_own_rank_only(digits, name):
    ranks = [{"ranks": DataRanks(rank, 2)} for rank in range(2)]
    with make(digits["val"], name, **ranks[0]) as first, make(digits["val"], name, **ranks[1]) as second:
        served = [position for loader in (first, second) for position in take(loader, 1)[0][1]]
        assert sorted(served) == list(range(16))
        assert counts_of(first, second) == [(0, 1), (0, 1)]


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
    masked = {**options, "decode": DecodeConfig(on_bad="mask")}
    with make(split, name, **masked) as first, make(split, name, **masked) as second:
        bad = [0, 0]
        for batches in zip(first.numpy(), second.numpy(), strict=True):
            bad = [count + len(batch.bad) for count, batch in zip(bad, batches, strict=True)]
        assert bad == [first.num_bad, second.num_bad] == [1, 1]
        assert sum(shared for shared, _ in counts_of(first, second)) == 7


def test_a_loader_in_a_forked_child_is_refused_and_the_parent_goes_on(digits, alone, name):
    with make(digits["val"], name) as loader:
        found = take(loader, 2)
        if (child := os.fork()) == 0:
            loader.close()
            os._exit(0)
        os.waitpid(child, 0)
        found += take(loader, 3)
        assert found == alone[:5]
        assert folder_of(name, DataRanks()).exists()


@contextmanager
def no_more_files():
    """No file can be opened by this process inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_can_open_no_more_files_decodes_alone(digits, alone, name):
    with make(digits["val"], name) as first, make(digits["val"], name) as second:
        assert take(first, 5) == take(second, 5) == alone[:5]
        with pytest.warns(RuntimeWarning, match="Too many open files"), no_more_files():
            assert take(second, 5) == alone[5:10]
        assert second.sharing.counts.lost > 0
        assert take(first, 10) == alone[5:15]
        assert take(second, 10) == alone[10:20]
        assert folder_of(name, DataRanks()).exists()


def test_an_interrupted_wait_loses_no_batch(digits, alone, name, monkeypatch):
    def interrupted(pending, timeout_s):
        raise KeyboardInterrupt

    with make(digits["val"], name) as loader:
        assert take(loader, 1) == alone[:1]
        with claims(loader, 4) as other:
            stream = endless(loader)
            assert [describe(next(stream)) for _ in range(3)] == alone[1:4]
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(PendingStep, "wait", interrupted)
                next(stream)
            other.leave()
            assert take(loader, 10) == alone[4:14]


def test_a_folder_that_vanishes_costs_no_batch(digits, alone, name):
    with make(digits["val"], name) as loader:
        assert take(loader, 3) == alone[:3]
        path = folder_of(name, DataRanks())
        for link in path.iterdir():
            link.unlink()
        path.rmdir()
        with pytest.warns(RuntimeWarning, match="No such file"):
            assert take(loader, 10) == alone[3:13]
        assert path.exists()


def test_a_folder_that_others_can_open_is_refused(digits, name):
    path = folder_of(name, DataRanks())
    path.mkdir(0o755)
    path.chmod(0o755)
    try:
        with make(digits["val"], name) as loader, pytest.raises(ConfigError, match="only this user can open"):
            take(loader, 1)
    finally:
        path.rmdir()
    path.symlink_to("/tmp")
    try:
        with make(digits["val"], name) as loader, pytest.raises(ConfigError, match="only this user can open"):
            take(loader, 1)
    finally:
        path.unlink()


def test_links_to_something_else_are_not_believed(digits, alone, name, tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100)
    with ExitStack() as stack, make(digits["val"], name) as loader:
        assert take(loader, 1) == alone[:1]
        path = folder_of(name, DataRanks())
        for step, target in enumerate([tmp_path, tmp_path / "file", Path("/dev/null")], 5):
            descriptor = os.open(target, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            (path / f"0-{8 * step}").symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        (path / "job-0").symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        (path / "nonsense").symlink_to("nowhere")
        other = GroupFolder(name, DataRanks(), {"other": 1})
        # What another job of other settings keeps under the same step, as after a race of two that join.
        other._membership._links = loader.sharing._folder._membership.links
        assert other.find_or_claim(Cursor(0, 80)) is None
        other.publish(Cursor(0, 80), "not a batch")
        with make(digits["val"], name) as second:
            assert take(loader, 20) == alone[1:21]
            assert take(second, 20) == alone[:20]
        assert loader.sharing.counts.lost == 0
        other.retire(lambda _: False)
        other._membership._links = None
        (path / "nonsense").unlink(missing_ok=True)
        (path / "job-0").unlink()


def test_a_loader_that_would_push_out_jobs_of_its_own_pace_is_refused(digits, name):
    with pytest.raises(ConfigError, match=r"prefetch is 7, more than the lag of 6"):
        make(digits["val"], name, decode=DecodeConfig(prefetch=7))
    make(digits["val"], name, decode=DecodeConfig(prefetch=6)).close()


def invert(pixels, generator):
    return 255 - pixels


def flip(pixels, generator):
    return pixels[::-1]


def test_a_transform_is_compared_by_its_code(digits, name, monkeypatch):
    with (
        make(digits["val"], name, augment=AugmentConfig(transform=invert)) as first,
        make(digits["val"], name, augment=AugmentConfig(transform=invert)) as second,
    ):
        assert take(first, 3) == take(second, 3)
        assert counts_of(first, second) == [(0, 3), (3, 0)]
        # As in another script, which is `__main__` too.
        monkeypatch.setattr(sys.modules[__name__], "invert", flip)
        monkeypatch.setattr(flip, "__qualname__", "invert")
        with (
            make(digits["val"], name, augment=AugmentConfig(transform=flip)) as other,
            pytest.raises(ConfigError, match="augment is"),
        ):
            take(other, 1)


def test_what_cannot_be_compared_with_other_jobs_is_refused(digits, name):
    with pytest.raises(ConfigError, match=r"cannot compare augment\.transform with that of other jobs"):
        make(digits["val"], name, augment=AugmentConfig(transform=lambda pixels, generator: pixels))


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
