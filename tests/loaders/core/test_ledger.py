"""What loaders write down and what the audit makes of it, against a count of every batch."""

import gc
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, UnavailableError
from datasvc.ledger.audit import audit
from datasvc.ledger.file import RECORD_BYTES, LedgerRecord, RecordKind, read_ledger
from datasvc.loaders.core.mixture import Mixture
from datasvc.order import OrderConfig
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from tests.examples import examples
from tests.loaders.echo import EchoLoader, write_numbers

SIZES = [5, 1, 9, 3, 12, 2, 8]
NUM_SAMPLES = sum(SIZES)
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A split of forty samples."""
    repository = Repository.create(str(tmp_path_factory.mktemp("numbers") / "repo"))
    write_numbers(repository, SIZES)
    return open_dataset(repository, "numbers")["train"]


def audit_of(*folders, **options):
    return audit([list(read_ledger(folder)) for folder in folders], **options)


def ranks_of(split, ledger, world_size, batch_size, state=None, **options):
    """Return the loaders of all ranks, restored from a state where one is given."""
    loaders = [
        EchoLoader(split, batch_size=batch_size, rank=rank, world_size=world_size, ledger=ledger, **options)
        for rank in range(world_size)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return loaders


def over_epochs(loader):
    """Yield batches for ever."""
    while True:
        yield from loader


def serve(loaders, steps):
    """Let all ranks take some steps; returns the state after them."""
    streams = [over_epochs(loader) for loader in loaders]
    for _ in range(steps):
        for stream in streams:
            next(stream)
    return loaders[0].state_dict()


def positions_of(uneven):
    return sorted(position for strided in uneven.ranges for position in strided.positions())


@dataclass
class Model:
    """Every sample that was handed over, and what a restart forgot of it."""

    lived: list = field(default_factory=list)
    forgotten: list = field(default_factory=list)

    def restore(self, state):
        place = (state["epoch"], state["position"])
        self.forgotten += [each for each in self.lived if each[0] >= place]
        self.lived = [each for each in self.lived if each[0] < place]

    def serve(self, batch, bad):
        before = (batch.before.epoch, batch.before.position)
        for position, counts in zip(batch.positions.tolist(), batch.mask.tolist(), strict=True):
            self.lived.append((before, batch.epoch, position, counts, counts and position in bad))


RUN = st.fixed_dictionaries(
    {
        "world_size": st.integers(1, 4),
        "batch_size": st.integers(1, 4),
        "steps": st.integers(0, 14),
        "saved_after": st.integers(0, 14),
        "restored": st.integers(0, 3),
        "ahead": st.sets(st.integers(0, 3)),
        "closed": st.booleans(),
    }
)
ORDERS = st.sampled_from(
    [OrderConfig(shuffle=None), OrderConfig(seed=3), OrderConfig(seed=3, shuffle="windowed", lanes=4, block=3)]
)


def test_a_loader_that_is_dropped_leaves_no_file_open(numbers, tmp_path):
    next(iter(EchoLoader(numbers, batch_size=2, rank=0, world_size=1, ledger=tmp_path)))
    gc.collect()
    (file,) = tmp_path.iterdir()
    opened = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    assert file not in opened


@examples(40)
@given(
    runs=st.lists(RUN, min_size=1, max_size=4),
    order=ORDERS,
    tail=st.sampled_from(["drop", "short", "pad"]),
    bad=st.sets(st.integers(0, NUM_SAMPLES - 1), max_size=3),
)
def test_the_audit_finds_what_a_count_finds_over_any_kills_restarts_and_resizes(
    numbers, tmp_path_factory, runs, order, tail, bad
):
    """Runs start from states that earlier ones saved, older ones too, and end killed, some ranks a step ahead."""
    ledger = tmp_path_factory.mktemp("ledgers") / "ledger"
    model, states = Model(), [EchoLoader(numbers, batch_size=1, order=order).state_dict()]
    attempts = []  # cursor and world size, and how many files each rank left, attempts that began alike as one
    for run in runs:
        states = states[: max(1, len(states) - run["restored"])]  # what was saved later is forgotten
        state = states[-1]
        loaders = ranks_of(
            numbers, ledger, run["world_size"], run["batch_size"], state, order=order, tail=tail, bad=bad
        )
        streams = [over_epochs(loader) for loader in loaders]
        has_begun = False  # a restart that serves nothing forgets nothing
        key, begun = (state["epoch"], state["position"], run["world_size"]), set()
        for step in range(run["steps"]):
            is_last = step == run["steps"] - 1
            for rank, stream in enumerate(streams):
                if not is_last or rank in run["ahead"] or not run["ahead"]:
                    if not has_begun:
                        model.restore(state)
                        has_begun = True
                    model.serve(next(stream), bad)
                    begun.add(rank)
            if step == run["saved_after"] and not is_last:
                states.append(loaders[0].state_dict())
                if run["closed"]:
                    loaders[0].close()
        if begun and (not attempts or attempts[-1][0] != key):
            attempts.append((key, Counter()))
        if begun:
            attempts[-1][1].update(begun)
    if not ledger.exists():
        return
    found = audit_of(ledger)
    assert not found.damage
    # A rank that was killed before its first batch left a file less than others, as one does whose file was lost.
    unequal = [len(set(num_files.values())) > 1 for _, num_files in attempts]
    assert all("where others left" in said for said in found.disagreements)
    assert unequal[-1] <= bool(found.disagreements) <= any(unequal)
    for epoch in found.epochs:
        lived = [each for each in model.lived if each[1] == epoch.epoch]
        forgotten = [each for each in model.forgotten if each[1] == epoch.epoch and each[3]]
        counted = Counter(position for _, _, position, counts, _ in lived if counts)
        assert set(counted.values()) <= {1}
        assert epoch.again + epoch.copies == len(forgotten)
        assert epoch.repeated.count == 0
        missing = [position for position in range(epoch.reached) if position not in counted]
        if epoch.is_finished:
            assert epoch.reached == NUM_SAMPLES
            assert epoch.padded == sum(1 for each in lived if not each[3])
        assert positions_of(epoch.never) == missing[: len(missing) - epoch.dropped]
        assert epoch.masked == sum(1 for each in lived if each[4] and each[2] < epoch.reached)
        assert epoch.served == len([p for p in counted if p < epoch.reached]) - epoch.masked
        # Only ranks that fell behind when the run was killed speak against it: at the end of an epoch, or before
        # they served anything.
        assert not epoch.never.count or epoch.is_finished or "left no file" in epoch.reasons[0]


def test_resized_from_8_to_6_to_12_ranks_at_odd_positions_the_epoch_is_proven(numbers, tmp_path):
    state = serve(ranks_of(numbers, tmp_path, 8, 1, tail="pad"), 1)
    forgotten = ranks_of(numbers, tmp_path, 6, 1, state, tail="pad")
    state = serve(forgotten, 1)
    serve(forgotten, 2)
    assert state["position"] == 14
    for loader in ranks_of(numbers, tmp_path, 12, 1, state, tail="pad"):
        assert len(list(loader)) == 3
    found = audit_of(tmp_path)
    (epoch,) = found.epochs
    assert found.is_proven
    assert (epoch.served, epoch.padded, epoch.again, epoch.copies) == (40, 10, 12, 0)
    assert list(found.world_sizes) == [8, 6, 12]


def test_a_run_may_go_back_to_a_state_of_an_attempt_that_was_given_up(numbers, tmp_path):
    first = ranks_of(numbers, tmp_path, 2, 2)
    state = serve(first, 6)
    serve(first, 2)
    serve(ranks_of(numbers, tmp_path, 1, 5), 2)  # anew, given up at 10
    for loader in ranks_of(numbers, tmp_path, 4, 2, state):
        list(loader)
    found = audit_of(tmp_path)
    (epoch,) = found.epochs
    assert found.is_proven
    assert (epoch.served, epoch.again) == (40, 8 + 10)


def test_a_whole_epoch_is_one_record_a_rank(numbers, tmp_path):
    for loader in ranks_of(numbers, tmp_path, 4, 2, order=OrderConfig(seed=3, shuffle="windowed", lanes=4, block=3)):
        assert len(list(loader)) == 5
    assert [len(file.records) for file in read_ledger(tmp_path)] == [1] * 4


def test_what_the_tail_drops_and_what_does_not_decode_is_counted(numbers, tmp_path):
    for loader in ranks_of(numbers, tmp_path, 2, 3, bad={0, 7, 39}):
        list(loader)
    found = audit_of(tmp_path)
    (epoch,) = found.epochs
    assert found.is_proven
    assert (epoch.served, epoch.masked, epoch.dropped, epoch.padded) == (34, 2, 4, 0)


def test_a_rank_whose_file_is_gone_is_named(numbers, tmp_path):
    for loader in ranks_of(numbers, tmp_path, 4, 2):
        list(loader)
    (gone,) = tmp_path.glob("*-rank2-of-4-*")
    gone.unlink()
    (epoch,) = audit_of(tmp_path).epochs
    assert positions_of(epoch.never) == [p for p in range(40) if p % 8 in (4, 5)]
    assert list(epoch.reasons) == ["in the attempt of 4 ranks from epoch 0, position 0, on rank 2 left no file"]


def test_earlier_files_do_not_stand_in_for_one_that_is_gone(numbers, tmp_path):
    """All was served before the restart too; but not for the weights that went on from it."""
    alone = ranks_of(numbers, tmp_path, 1, 8)
    state = serve(alone, 2)
    serve(alone, 3)
    for loader in ranks_of(numbers, tmp_path, 2, 4, state):
        list(loader)
    assert audit_of(tmp_path).is_proven
    (gone,) = tmp_path.glob("*-rank1-of-2-*")
    gone.unlink()
    (epoch,) = audit_of(tmp_path).epochs
    assert positions_of(epoch.never) == [p for p in range(16, 40) if p % 8 >= 4]


@pytest.mark.parametrize("num_peers", [1, 2])
def test_a_file_of_an_attempt_before_does_not_stand_in_for_one_that_is_gone(numbers, tmp_path, num_peers):
    """Both attempts began at the same cursor with as many ranks; each rank had as many model-parallel peers."""
    for _ in range(2 * num_peers):
        for loader in ranks_of(numbers, tmp_path, 2, 4):
            list(loader)
    assert audit_of(tmp_path).is_proven
    max(tmp_path.glob("*-rank1-of-2-*")).unlink()
    found = audit_of(tmp_path)
    left, others = f"{2 * num_peers - 1} file{'s' * (num_peers > 1)}", 2 * num_peers
    (said,) = found.disagreements
    assert said.startswith(f"from epoch 0, position 0, on rank 1 left {left} where others left {others}")
    (epoch,) = found.epochs
    assert list(epoch.disagreements) == [said]
    assert not epoch.is_proven
    assert not found.is_proven


def test_unequal_numbers_of_files_speak_against_no_epoch_that_they_say_nothing_of(numbers, tmp_path):
    for _ in range(2):
        loaders = ranks_of(numbers, tmp_path, 2, 4)
        state = serve(loaders, 2)
    max(tmp_path.glob("*-rank1-of-2-*")).unlink()
    serve(ranks_of(numbers, tmp_path, 1, 8, state), 8)
    found = audit_of(tmp_path)
    assert [epoch.is_proven for epoch in found.epochs] == [False, True]
    assert not found.is_proven
    assert audit_of(tmp_path, epoch=1).is_proven


def rewrite(path, change):
    """Write a file again, as a fault might: `change` gets its records, and returns them."""
    content = path.read_bytes()
    (found,) = read_ledger(path)
    header = content[: len(content) - RECORD_BYTES * len(found.records)]
    path.write_bytes(header + b"".join(record.encode() for record in change(list(found.records))))


def test_a_batch_that_one_rank_lost_is_named(numbers, tmp_path):
    loaders = ranks_of(numbers, tmp_path, 2, 4)
    streams = [iter(loader) for loader in loaders]
    for step in range(5):
        if step == 2:
            loaders[1]._ledger.write = lambda *_: None
        for stream in streams:
            next(stream)
        if step == 2:
            del loaders[1]._ledger.write
    assert not any(list(stream) for stream in streams)
    (epoch,) = audit_of(tmp_path).epochs
    assert positions_of(epoch.never) == [20, 21, 22, 23]
    (reason,) = epoch.reasons
    assert "rank 1 skipped positions 16 to 23" in reason


def test_a_sample_that_was_served_twice_is_named(numbers, tmp_path):
    for loader in ranks_of(numbers, tmp_path, 2, 4):
        list(loader)
    (path,) = tmp_path.glob("*-rank1-of-2-*")
    twice = LedgerRecord(RecordKind.SERVED, 0, next(iter(read_ledger(path))).records[0].strided.clip(8, 16), 4)
    rewrite(path, lambda records: [*records, twice])
    found = audit_of(tmp_path)
    (epoch,) = found.epochs
    assert not found.is_proven
    assert (positions_of(epoch.repeated), epoch.served) == ([12, 13, 14, 15], 36)
    assert "rank 1 served positions 8 to 15 twice" in epoch.reasons[0]


def test_two_processes_with_one_data_rank_leave_the_other_missing(numbers, tmp_path):
    for _ in range(2):
        list(EchoLoader(numbers, batch_size=4, rank=0, world_size=2, ledger=tmp_path))
    (epoch,) = audit_of(tmp_path).epochs
    assert (epoch.never.count, epoch.copies) == (20, 20)
    assert "rank 1 left no file" in epoch.reasons[0]


def test_model_parallel_peers_are_copies_and_no_repeats(numbers, tmp_path):
    """Four processes as 2 x 2, stopped and started again."""
    peers = [*ranks_of(numbers, tmp_path, 2, 4), *ranks_of(numbers, tmp_path, 2, 4)]
    state = serve(peers, 2)
    for loader in [*ranks_of(numbers, tmp_path, 2, 4, state), *ranks_of(numbers, tmp_path, 2, 4, state)]:
        list(loader)
    found = audit_of(tmp_path)
    assert found.is_proven
    assert (found.epochs[0].served, found.epochs[0].copies, found.epochs[0].again) == (40, 40, 0)


def test_an_epoch_under_way_is_proven_as_far_as_all_ranks_are(numbers, tmp_path):
    loaders = ranks_of(numbers, tmp_path, 2, 4)
    serve(loaders, 2)
    serve(loaders[:1], 1)
    found = audit_of(tmp_path)
    (epoch,) = found.epochs
    assert (epoch.is_finished, epoch.is_faultless, epoch.reached, epoch.served) == (False, True, 16, 16)
    assert not found.is_proven


def test_a_ledger_that_begins_in_the_middle_of_an_epoch_does_not_prove_it(numbers, tmp_path):
    loaders = ranks_of(numbers, None, 1, 8)
    state = serve(loaders, 2)
    serve(ranks_of(numbers, tmp_path, 1, 8, state), 8)
    found = audit_of(tmp_path)
    assert [epoch.is_proven for epoch in found.epochs] == [False, True]
    assert positions_of(found.epochs[0].never) == list(range(16))
    assert audit_of(tmp_path, epoch=1).is_proven


def test_ranks_that_cut_batches_differently_are_told_apart(numbers, tmp_path):
    for rank, batch_size in ((0, 4), (1, 5)):
        list(EchoLoader(numbers, batch_size=batch_size, rank=rank, world_size=2, ledger=tmp_path))
    found = audit_of(tmp_path)
    assert list(found.disagreements) == [
        "from epoch 0, position 0, on ranks differ in batch_size: 4 on ranks 0; 5 on ranks 1"
    ]
    assert not found.is_proven


def test_a_ledger_of_another_order_is_refused_at_once_and_by_the_audit(numbers, tmp_path):
    list(EchoLoader(numbers, batch_size=4, world_size=2, ledger=tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"'seed': 1.* this loader reads .*'seed': 2.* give each its own folder"):
        EchoLoader(numbers, batch_size=4, rank=1, world_size=2, order=OrderConfig(seed=2), ledger=tmp_path / "a")
    list(EchoLoader(numbers, batch_size=4, rank=1, world_size=2, order=OrderConfig(seed=2), ledger=tmp_path / "b"))
    found = audit_of(tmp_path / "a", tmp_path / "b")
    assert "rank 1 read numbers@1/train, 40 samples, with" in found.disagreements[0]
    assert not found.is_proven


def test_folders_of_several_nodes_are_one_ledger(numbers, tmp_path):
    """A node has the files of its own ranks; a clock that was set back between two runs changes nothing on one."""
    folders = [tmp_path / "a", tmp_path / "b"]

    def loaders(state=None):
        return [ranks_of(numbers, folder, 2, 4, state)[rank] for rank, folder in enumerate(folders)]

    state = serve(loaders(), 2)
    for loader in loaders(state):
        list(loader)
    assert not audit_of(folders[0]).is_proven
    found = audit_of(*folders)
    assert found.is_proven
    assert list(found.world_sizes) == [2, 2]


def test_a_mixture_is_audited_by_its_own_positions(numbers, tmp_path):
    write_numbers(numbers.repository, [20])
    mixture = Mixture([(numbers, 1), (open_dataset(numbers.repository, "numbers")["train"], 2)])
    for loader in ranks_of(mixture, tmp_path, 2, 4):
        list(loader)
    found = audit_of(tmp_path)
    assert found.is_proven
    assert found.header.source == f"numbers@1/train + {mixture.splits[1].dataset}/train"
    with pytest.raises(ConfigError, match="give each its own folder"):
        ranks_of(numbers, tmp_path, 2, 4)


def test_an_interrupt_between_the_ledger_and_the_loader_repeats_nothing(numbers, tmp_path):
    loader = EchoLoader(numbers, batch_size=8, ledger=tmp_path, bad={9})
    real = loader._ledger.write

    def interrupted(*batch):
        real(*batch)
        raise KeyboardInterrupt

    batches = iter(loader)
    next(batches)
    loader._ledger.write = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    del loader._ledger.write
    assert [batch.step.start for batch in loader] == [8, 16, 24, 32]
    (epoch,) = audit_of(tmp_path).epochs
    assert epoch.is_proven
    assert (epoch.served, epoch.masked) == (39, 1)


def test_the_state_is_the_same_with_a_ledger_and_without(numbers, tmp_path):
    states = [serve(ranks_of(numbers, ledger, 1, 8), 3) for ledger in (None, tmp_path)]
    assert states[0] == states[1]


def test_a_loader_that_serves_nothing_leaves_nothing(numbers, tmp_path):
    with EchoLoader(numbers, batch_size=8, ledger=tmp_path / "ledger") as loader:
        loader.load_state_dict(loader.state_dict())
    assert not (tmp_path / "ledger").exists()


def test_a_ledger_that_cannot_be_written_is_said_before_the_batch_is_served(numbers, tmp_path):
    with pytest.raises(ConfigError, match="which is a file"):
        EchoLoader(numbers, batch_size=8, ledger=__file__)
    loader = EchoLoader(numbers, batch_size=8, ledger=tmp_path / "ledger")
    (tmp_path / "ledger").write_text("in the way")
    with pytest.raises(UnavailableError, match="cannot write the ledger"):
        next(iter(loader))
    assert loader.state_dict()["position"] == 0
    (tmp_path / "ledger").unlink()
    assert len(list(loader)) == 5
    assert audit_of(tmp_path / "ledger").is_proven


PROGRAM = """
import sys
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from tests.loaders.echo import EchoLoader
url, ledger, position = sys.argv[1], sys.argv[2], int(sys.argv[3])
loader = EchoLoader(open_dataset(Repository.open(url), "numbers@1")["train"], batch_size=2, ledger=ledger)
loader.load_state_dict({**loader.state_dict(), "position": position})
for batch in loader:
    print(batch.after.position, flush=True)
    sys.stdin.readline()
"""


def test_a_killed_process_leaves_every_batch_that_it_handed_over(numbers, tmp_path):
    position = 0
    for steps in (3, 5, 2):
        command = [sys.executable, "-c", PROGRAM, numbers.repository.url, str(tmp_path / "ledger"), str(position)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            for _ in range(steps):
                position = int(process.stdout.readline())
                process.stdin.write("\n")
                process.stdin.flush()
            assert int(process.stdout.readline()) == position + 2
            process.kill()
    found = audit_of(tmp_path / "ledger")
    (epoch,) = found.epochs
    assert (found.num_files, epoch.reached, epoch.served, epoch.again) == (3, 22, 22, 4)
    assert epoch.is_faultless
