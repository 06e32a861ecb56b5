"""Which versions consumed a sample: against what loaders served, over kills, resizes, forks and fine-tuning."""

from collections import Counter
from itertools import chain, count

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.loaders import Masked
from datasvc.loaders.core.mixture import Mixture, MixtureStage, splits_of
from datasvc.models import CodeRevision, ConsumptionTracker, DataUse, ReadSpan, find_consumers, save
from datasvc.models.provenance.lineage import read_lineage
from datasvc.models.provenance.segments import history_of
from datasvc.models.transfer import transfer
from datasvc.order import OrderConfig
from datasvc.repository import Repository
from datasvc.repository.removal import remove_versions
from datasvc.shards import open_dataset
from datasvc.shards.history.columns import add_column, set_column
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.deletions import delete_samples
from tests.drawing.hostile import parsed, text_of, with_class
from tests.examples import examples
from tests.loaders.numbered import Copies, Numbers, make_splits, mix, sample_of
from tests.models.trainings import Batches, Run, Truth, commit
from tests.shards.written_versions import LABELLED_SCHEMA, write_version

SIZES = [Batches(2), Batches(3, 2), Batches(1, 3, "pad"), Batches(5, 1, "short"), Batches(2, 2, "pad"), Batches(4, 3)]
WINDOWED = OrderConfig(seed=3, shuffle="windowed", lanes=3, block=4)
FRESH = count()
UNKNOWN = CodeRevision(None, dirty=False)
ORDERS = [OrderConfig(seed=7), OrderConfig(seed=8), WINDOWED, OrderConfig(shuffle=None)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Splits of a repository that trainings of a module share, with a deletion, and mixtures of them."""
    splits = make_splits(tmp_path_factory.mktemp("find_consumers"))
    big = splits["big"]
    objects = big.repository.objects
    table = delete_samples(objects, big.table, {0: np.array([1, 4]), 3: np.array([0, 1])})
    cut = Split("train", "big@2", big.repository, objects.put(table.encode()).digest)
    view = cut.where("label % 3 <> 0")
    return {
        "big": big,
        "cut": cut,
        "view": view,
        "weighted": view.weighted("label"),
        "views": Mixture(
            [(view, 2), (splits["middle"].take(0.5, seed=1).weighted("label"), 1)], block=9, epoch_samples=25
        ),
        "middle": splits["middle"],
        "tiny": splits["tiny"],
        "mixture": mix(splits),
        "short": Mixture([(splits["middle"], 3), (cut, 1), (splits["tiny"], 0)], block=9, epoch_samples=31),
    }


def keys_of(data):
    return [str(sample["label"]) for name in ("big", "middle") for sample in data[name]] + ["300", "301"]


def own_of(found):
    own = {}
    for each in found.all_uses():
        own.setdefault(each.version, Counter())[each.key, each.data, each.epoch, each.position, each.step] += 1
        assert each.is_certain
    return own


def check(repository, truth, keys):
    found = find_consumers(repository, sorted({name.partition("@")[0] for name in truth.own}), keys=keys)
    assert found.gaps == {}
    assert own_of(found) == {name: own for name, own in truth.own.items() if own}
    for each in found.versions:
        seen = {key for key, *_ in truth.seen_by(each.name)}
        assert (each.num_samples, each.is_complete) == (len(seen), True)
        assert each.num_own == len({key for key, *_ in truth.own[each.name]})
    for number, key in enumerate(keys):
        expected = {name for name in truth.own if any(key == each for each, *_ in truth.seen_by(name))}
        assert set(found.versions_with(number)) == expected


number = st.integers(0, 1 << 16)
actions = st.lists(
    st.tuples(
        st.sampled_from(["train", "train", "save", "save", "kill", "tune", "anew", "resize", "average"]), number
    ),
    min_size=2,
    max_size=14,
)


def choose(options, number):
    return options[number % len(options)]


def masks_from(number, samples):
    """Return masks of positions and samples, or None."""
    if number % 3 == 0:
        return None
    split = splits_of(samples)[0]
    stored = split.table.stored_per_shard.tolist()
    chosen = {0: [number % 5], 2: [0, 1]}
    rows = Masked.rows(
        split.digest,
        {shard: [row for row in chosen[shard] if row < stored[shard]] for shard in chosen if shard < len(stored)},
    )
    return Masked(((number % 4, number % 7, number % 7 + number % 11),)) | (rows if number % 3 == 1 else Masked())


@examples(40)
@given(actions=actions, first=number)
def test_every_sample_at_every_step_is_found_however_runs_were_killed_resized_forked_and_tuned(data, actions, first):
    repository, truth = data["big"].repository, Truth()
    cnn, tuned = (f"{name}-{next(FRESH)}" for name in ("cnn", "tuned"))
    readable = ["big", "cut", "middle", "mixture", "short", "view", "weighted", "views"]
    run = Run(repository, truth, cnn, data[choose(readable, first)], order=choose(ORDERS, first // 5))
    for action, value in actions:
        versions = [name for name in truth.own if truth.states[name]]
        if action == "train":
            run.train(value % 9 + 1)
        elif action == "save":
            run.save()
        elif action == "resize":
            run.resize(choose(SIZES, value))
        elif action == "kill" and versions:
            back = choose(versions, value)  # what was served since is in no weights any more
            samples, order, _ = truth.states[back]
            run = Run(
                repository, truth, cnn, samples, order=order, batches=choose(SIZES, value // 7), resumed=back,
                masked=masks_from(value, samples),
            )  # fmt: skip
        elif action == "tune" and versions:
            run = Run(
                repository, truth, choose([cnn, tuned], value), data[choose(readable, value // 2)],
                order=choose(ORDERS, value // 11), base=choose(versions, value // 3),
                step=choose([None, 0], value // 5),
            )  # fmt: skip
        elif action == "anew":
            samples = data[choose(readable, value)]
            masked = masks_from(value // 2, samples)
            run = Run(repository, truth, cnn, samples, order=choose(ORDERS, value // 5), masked=masked)
        elif action == "average" and versions:
            parents = [choose(versions, value), choose(versions, value // 3)]
            step = max(truth.steps[parent] for parent in parents)
            truth.add(commit(repository, cnn, step, [], parent=parents[0], merged=parents[1:]), Counter(), parents)
            truth.steps[list(truth.own)[-1]] = step
    run.save()
    check(repository, truth, keys_of(data))


def planned(data, *stages):
    """Return a mixture of three splits in blocks of 10, with stages (start, weights of the splits[, ramp])."""
    parts = [data["big"], data["middle"], data["tiny"]]
    later = [MixtureStage(start, dict(zip(parts, weights, strict=True)), *ramp) for start, weights, *ramp in stages]
    return Mixture(list(zip(parts, (5, 3, 2), strict=True)), block=10, epoch_samples=37, stages=later)


@pytest.mark.slow
@examples(25)
@given(
    runs=st.lists(st.tuples(st.integers(1, 25), number), min_size=2, max_size=5),
    order=st.sampled_from(ORDERS),
)
def test_samples_are_found_over_changes_of_weights_that_were_planned_and_that_a_resume_made(data, runs, order):
    repository, truth, name = data["big"].repository, Truth(), f"staged-{next(FRESH)}"
    stages, run = [(60, (1, 0, 4)), (100, (0, 1, 1)), (220, (3, 1, 0), True), (240, (1, 1, 1))], None
    for num_steps, value in runs:
        if run is not None:
            state = truth.states[run.version][2]
            block = -(-(state["epoch"] * 37 + state["position"]) // 10)
            # What has begun stays, a ramp to its end.
            begun = [start < 10 * block for start in (0, *(start for start, *_ in stages))]
            kept = [each for each, is_begun, before in zip(stages, begun[1:], begun[:-1], strict=True)
                    if is_begun or (before and len(each) > 2)]  # fmt: skip
            if value % 3:  # else resumed as it was
                free = max([10 * block, *(start + 10 for start, *_ in kept)])
                stages = [*kept, (free, choose([(0, 1, 1), (7, 0, 1)], value)), (free + 50, (2, 2, 1), True)]
        run = Run(
            repository, truth, name, planned(data, *stages), order=order, batches=choose(SIZES, value),
            resumed=None if run is None else run.version,
        )  # fmt: skip
        run.train(num_steps), run.save()
        if value % 2:
            run.resize(choose(SIZES, value // 7)), run.train(3), run.save()
    check(repository, truth, keys_of(data))


def test_a_process_that_takes_over_with_other_stages_counts_no_sample_twice(data):
    repository, truth = data["big"].repository, Truth()
    run = Run(repository, truth, "taken", planned(data))
    run.train(12), run.save(), run.train(2)
    state, at = run.reading.state_dict(), run.loaders[0].state_dict()
    taken = Run(repository, truth, "taken", planned(data, (30, (0, 0, 1))))
    taken.version, taken.step, taken.served = run.version, run.step, Counter(run.served)
    taken._open(Batches(3, 2), at)
    taken.reading = ConsumptionTracker(taken.loaders[0], step=run.step)
    taken.reading.load_state_dict(state)
    taken.train(4), taken.save()
    check(repository, truth, keys_of(data))


def test_a_save_that_failed_leaves_no_hole_in_what_the_next_one_says(data):
    repository, truth = data["big"].repository, Truth()
    run = Run(repository, truth, "failing", data["big"])
    run.train(3), run.save()
    run.train(5)
    run.reading.use()  # of a save that did not come about
    run.train(17), run.save()
    run.train(25), run.save()  # from within an epoch that the run began long ago
    check(repository, truth, keys_of(data))


def test_entries_of_earlier_releases_are_read_by_what_their_states_say(data):
    """They have neither runs nor spans: a state counts from that of the version above, or from the beginning."""
    repository, truth = data["big"].repository, Truth()
    run = Run(repository, truth, "plain", data["big"], batches=Batches(4, 1, "pad"))
    expected = {}
    for name in ("old@1", "old@2"):
        run.train(4), run.save()
        expected[name] = Counter({each[:-1]: count for each, count in truth.own[run.version].items()})
        use = {"dataset": "big@1", "split": "train", "state": run.loaders[0].state_dict()}
        commit(repository, "old", run.step, [use], parent="old@1" if name == "old@2" else None)
    commit(repository, "old", run.step, [{**use, "state": {**use["state"], "epoch": 1}}], parent="old@2")
    found = find_consumers(repository, ["old"], keys=keys_of(data))
    own = {}
    for each in found.all_uses():
        assert each.step is None
        if each.version != "old@3":
            assert each.is_certain
            own.setdefault(each.version, Counter())[each.key, each.data, each.epoch, each.position] += 1
    assert own == expected
    # Epoch 0 ended, and nothing says whether all of it was served.
    last = [each for each in found.all_uses() if each.version == "old@3"]
    assert {(each.epoch, each.is_certain) for each in last} == {(0, False), (1, True)}
    assert "may have been dropped" in found.gaps["old@3"][0]
    assert [each.is_complete for each in found.versions] == [True, True, False]


def test_what_is_not_known_is_said_of_a_version_and_of_all_that_continue_it(data):
    repository, split = data["big"].repository, data["big"]
    loader = Numbers(split, 4, tail="drop", prefetch=0)
    reading = ConsumptionTracker(loader)
    next(iter(loader))
    use = reading.use().to_dict()
    foreign = {**use, "state": {**use["state"], "version": "ab" * 32}}
    far = {**use, "spans": [ReadSpan((0, 0), (0, 99), 0, 4, "drop").to_dict()]}
    cases = {
        "silent": ([], {}, "does not record the data"),
        "elsewhere": ([foreign], {}, "shard table abababababab..., which is not in this repository"),
        "orphan": ([use], {"parent": "nobody@7"}, "continues 'nobody@7', which is not in this repository"),
        "moved": ([use], {"parent": "silent"}, "a parent without a version number is ambiguous"),
        "stateless": ([{**use, "state": {"epoch": 1, "position": 2}}], {}, "reading big@1/train is not valid"),
        "far": ([far], {}, "exceeds epochs of 40 samples"),
        "spanless": ([{**use, "spans": [{"start": [1, 0], "stop": [0, 0]}]}], {}, "not a valid span"),
        "circle": ([use], {"parent": "circle@1"}, "which continues it"),
        "copied": ([use], {"origin": {"parents": ["base@4"]}}, "continues base@4 of another repository, and has"),
        "odd": ([], {"data": "data"}, "does not record the data"),
        "cut": ([ReadSpan((0, 0), (0, 4), 7, 4, "drop")], {}, "began at step 7, but no version"),
        "torn": ([use], {"history": "all"}, "samples that ancestors in another repository consumed is not valid"),
        "worn": ([use], {"history": [3, None, {"gap": 1}, {"run": [1]}]}, "another repository consumed is not valid"),
        "unnamed": ([{**use, "run": ["a"]}], {}, "not a valid data use: TypeError"),
    }  # fmt: skip
    for name, (uses, fields, message) in cases.items():
        said = [{**use, "spans": [each.to_dict()]} if isinstance(each, ReadSpan) else each for each in uses]
        commit(repository, name, 1, said, **fields)
        commit(repository, name, 1, [], parent=f"{name}@1")
        found = find_consumers(repository, [name], keys=["100"])
        assert message in " ".join(found.gaps[f"{name}@1"]), name
        assert [each.is_complete for each in found.versions] == [False, False], name
        assert message in " ".join(text_of(parsed(found._repr_html_())).split()), name
        assert f"{name}@2" not in found.gaps
        assert with_class(parsed(read_lineage(repository, f"{name}@2")._repr_html_()), "node"), name
        assert history_of(repository, f"{name}@2"), name


def test_data_that_weights_were_evaluated_on_was_not_consumed(data):
    repository, split = data["big"].repository, data["big"]
    loader = Numbers(split, 4, tail="pad", prefetch=0)
    list(loader)
    use = DataUse("big@1", "train", loader.state_dict(), purpose="evaluation")
    commit(repository, "judged", 0, [use])
    (version,) = find_consumers(repository, ["judged"], keys=keys_of(data)).versions
    assert (version.num_samples, version.is_complete) == (0, True)


def test_steps_of_several_batches_are_not_told_wrong(data):
    repository = data["big"].repository
    loader = Numbers(data["big"], 2, tail="drop", prefetch=0)
    reading, batches = ConsumptionTracker(loader), iter(loader)
    served = [next(batches)[1] for _ in range(6)]
    commit(repository, "accumulated", 3, [reading.use()])  # two batches a step
    found = find_consumers(repository, ["accumulated"], keys=keys_of(data))
    assert sorted(int(each.key) for each in found.all_uses()) == sorted(chain.from_iterable(served))
    assert {each.step for each in found.all_uses()} == {None}
    assert found.to_pandas()["key"].tolist() == [each.key for each in found.all_uses()]
    assert f"accumulated@1 {len(set(found.to_arrow()['key'].to_pylist()))}" in text_of(parsed(found._repr_html_()))


def test_what_a_living_process_consumed_goes_with_its_weights(data):
    repository, truth = data["big"].repository, Truth()
    run = Run(repository, truth, "elastic", data["big"])
    run.train(3), run.save(), run.train(18)  # an epoch has 20 steps
    state = run.reading.state_dict()
    taken, where = Run(repository, truth, "elastic", data["big"]), run.loaders[0].state_dict()
    with pytest.raises(ConfigError, match="load the loader's state of the same moment first"):
        taken.reading.load_state_dict(state)
    with pytest.raises(CorruptDataError, match="not a state of a ConsumptionTracker"):
        taken.reading.load_state_dict({"run": "a", "spans": []})
    taken.version, taken.step, taken.served = run.version, run.step, Counter(run.served)
    taken._open(Batches(3, 2), where)
    taken.reading = ConsumptionTracker(taken.loaders[0], step=run.step)
    taken.train(1), taken.save()
    assert "began at step 21" in find_consumers(repository, ["elastic"], keys=["1"]).gaps["elastic@2"][0]
    taken = Run(repository, truth, "elastic", data["big"])
    taken.version, taken.step, taken.served = "elastic@1", run.step, Counter(run.served)
    taken._open(Batches(3, 2), where)
    taken.reading = ConsumptionTracker(taken.loaders[0], step=run.step)
    taken.reading.load_state_dict(state)
    taken.train(1), taken.save()
    truth.own.pop("elastic@2")
    found = find_consumers(repository, ["elastic@1", "elastic@3"], keys=keys_of(data))
    assert found.gaps == {}
    assert own_of(found) == truth.own


def test_a_loader_that_was_put_back_needs_a_new_reading(data):
    loader = Numbers(data["big"], 2, tail="drop", prefetch=0)
    batches, before = iter(loader), loader.state_dict()
    next(batches)
    reading = ConsumptionTracker(loader)
    loader.load_state_dict(before)
    with pytest.raises(ConfigError, match=r"was reset.* make a new ConsumptionTracker"):
        reading.use()


def label(number):
    return sample_of(number, LABELLED_SCHEMA)


def numbers_of(batch):
    return batch, [int(view.tobytes()) for view in batch.blobs]


@pytest.fixture
def pets(repository):
    """`pets@1` of two splits, `pets@2` without two of its samples; and versions that were trained on each."""
    splits = {"train": [[label(number) for number in range(9)]], "val": [[label(number) for number in range(5, 8)]]}
    write_version(repository, "pets", splits, LABELLED_SCHEMA)
    delete(repository, "pets@1", keys=["3", "5"])
    truth = Truth()
    for version in (1, 2):
        run = Run(repository, truth, f"cnn{version}", open_dataset(repository, f"pets@{version}")["train"])
        run.train(2), run.save(), run.train(2), run.save()
    return repository, truth


def test_samples_that_a_version_deleted_are_found_where_they_were_consumed_before(pets):
    repository, truth = pets
    found = find_consumers(repository, deleted_in="pets@2")
    assert found.keys == ["3", "5", "5"]  # of train, and of val
    assert found.missing.tolist() == [2]  # nobody was trained on val
    expected = {name: {key for key, *_ in truth.seen_by(name)} & {"3", "5"} for name in truth.own}
    assert {each.name: each.num_samples for each in found.versions} == {
        name: len(keys) if name.startswith("cnn1") else 0 for name, keys in expected.items()
    }
    assert {each.data for each in found.all_uses()} == {"pets@1/train"}
    assert find_consumers(repository, deleted_in="pets@2", split="val").keys == ["5"]
    assert find_consumers(repository, ["cnn1@1"], keys=["3"], data="pets@2").missing.tolist() == [0]
    with pytest.raises(NotFoundError, match="first version of pets, so it deleted or corrected no samples"):
        find_consumers(repository, deleted_in="pets@1")
    with pytest.raises(ConfigError, match="either by keys or by the data-set version"):
        find_consumers(repository)


def test_versions_that_learned_a_label_which_was_corrected_since_are_found(pets, monkeypatch):
    repository, truth = pets
    # The numbers of samples are in their blobs: the labels are corrected.
    monkeypatch.setattr(Copies, "take", lambda self: numbers_of(self._fed.pop(0)))
    split = open_dataset(repository, "pets@2")["train"]
    wrong = {sample["key"]: sample["label"] for sample in split if sample["key"] in {"1", "6"}}
    add_column(repository, "pets", "score", pa.table({"key": ["1"], "score": [0.5]}), missing="ok")  # all the same
    corrected = pa.table({"key": list(wrong), "label": [label + 1 for label in wrong.values()]})
    set_column(repository, "pets", "label", corrected, split="train")
    run = Run(repository, truth, "right", open_dataset(repository, "pets@4")["train"])
    run.train(2), run.save(), run.train(2), run.save()
    found = find_consumers(repository, changed_in="pets@4")
    assert found.keys == ["1", "6"]
    expected = {name: {key for key, *_ in truth.seen_by(name)} & wrong.keys() for name in truth.own}
    assert expected["right@2"]  # it learned the corrected labels
    assert {each.name: each.num_samples for each in found.versions} == {
        name: 0 if name.startswith("right") else len(keys) for name, keys in expected.items()
    }
    assert find_consumers(repository, changed_in="pets@3").keys == []
    with pytest.raises(ConfigError, match="deleted or corrected them, not both"):
        find_consumers(repository, changed_in="pets@4", deleted_in="pets@2")


def test_samples_of_removed_versions_are_still_found_when_their_shards_are_gone(pets):
    repository, _ = pets
    before = list(find_consumers(repository, deleted_in="pets@2").all_uses())
    splits = [open_dataset(repository, f"pets@{number}")["train"] for number in (1, 2)]
    shards = {shard.digest for split in splits for shard in split.table.shards()}
    remove_versions(repository, "datasets", ["pets@1", "pets@2"])
    for shard in shards:  # as `gc` does
        repository.objects.local_path(shard).unlink()
    assert list(find_consumers(repository, deleted_in="pets@2").all_uses()) == before != []
    assert find_consumers(repository, ["cnn1@1"], keys=["3"], data="pets@2").missing.tolist() == [0]
    lineage = read_lineage(repository, "cnn1@1")
    assert (list(lineage.datasets), lineage.gaps) == (["pets@1"], [])


def test_a_version_that_went_elsewhere_without_its_ancestors_takes_along_what_they_consumed(pets, tmp_path):
    repository, truth = pets
    split = open_dataset(repository, "pets@1")["train"]
    tuned = Run(repository, truth, "tuned", split, order=WINDOWED, base="cnn1@2", batches=Batches(4, 1, "pad"))
    tuned.train(3), tuned.save(), tuned.train(1), tuned.save()
    history = history_of(repository, "tuned@2")
    assert len(history) == 2  # a run is one chunk of it, however many versions it saved
    other = Repository.create(str(tmp_path / "other"))
    write_version(
        other, "pets", {"train": [[label(number) for number in range(9)]]}, LABELLED_SCHEMA
    )  # fmt: skip
    entry = repository.versions("models", "tuned").read(2).content
    commit(other, "received", entry["step"], entry["data"], parent="tuned@1", history=history)
    commit(other, "received", entry["step"], [], parent="received@1")
    keys = list(map(str, range(9)))
    here, there = find_consumers(repository, ["tuned@2"], keys=keys), find_consumers(other, ["received"], keys=keys)
    assert there.gaps == {}
    assert "cnn1@1 elsewhere" not in {each.version for each in there.all_uses()}  # one chunk, named by its newest
    assert "cnn1@2 elsewhere" in {each.version for each in there.all_uses()}
    told = [[each._replace(version="") for each in found.all_uses()] for found in (here, there)]
    assert Counter(told[0]) == Counter(told[1])
    assert there.versions[1].num_samples == here.versions[0].num_samples == 9
    again = history_of(other, "received@2")
    assert [each["version"] for each in again] == ["cnn1@2", "received@1"]


def test_a_version_that_is_pushed_alone_answers_as_at_home(pets, tmp_path):
    repository, _ = pets
    loader = Numbers(open_dataset(repository, "pets@1")["train"], 2, tail="pad", prefetch=0)
    batches, reading, parent = iter(loader), ConsumptionTracker(loader), None
    for step in (1, 2, 3):
        next(batches)
        parent = str(save(repository, "real", {}, step=step, data=[reading.use()], parent=parent, code=UNKNOWN))
    other = Repository.create(str(tmp_path / "other"))
    transfer(repository, other, ["real@3"], with_data=True)
    keys = list(map(str, range(9)))
    here, there = find_consumers(repository, ["real@3"], keys=keys), find_consumers(other, keys=keys)
    assert (there.gaps, there.versions[0].num_samples, here.versions[0].num_samples) == ({}, 6, 6)
    told = [[each._replace(version="") for each in found.all_uses()] for found in (here, there)]
    assert Counter(told[0]) == Counter(told[1])


def test_of_steps_without_recorded_samples_not_all_is_known(pets):
    repository, _ = pets
    loader = Numbers(open_dataset(repository, "pets@1")["train"], 2, prefetch=0)
    next(iter(loader))
    for step, parent, use in ((0, None, []), (1, "plain@1", [ConsumptionTracker(loader).use()]), (4, "plain@2", [])):
        save(repository, "plain", {}, step=step, data=use, parent=parent, code=UNKNOWN)
    save(repository, "plain", {}, step=4, parent="plain@3", code=UNKNOWN)
    found = find_consumers(repository, ["plain"], keys=["0"])
    assert found.gaps == {"plain@3": ("it does not record the data that its steps consumed",)}
    assert [each.is_complete for each in found.versions] == [True, True, False, False]


def test_a_loader_that_does_not_tell_what_it_served_is_refused_by_its_name():
    with pytest.raises(ConfigError, match="a list does not report which samples it has served: save without data="):
        ConsumptionTracker([1, 2])
