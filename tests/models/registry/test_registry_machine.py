"""Any sequence of saves, tags, removals, retentions and collections, against a model in memory."""

import shutil
import tempfile
import time

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from datasvc.api.gc import GRACE_S, gc_at
from datasvc.errors import ConfigError, ConflictError, NotFoundError
from datasvc.models import CodeRevision, model_log, restore, save
from datasvc.models.registry.retention import RetentionPolicy, remove, retain
from datasvc.models.search import find_versions
from datasvc.models.transfer import transfer
from datasvc.repository import Repository
from tests.examples import examples

NO_CODE = CodeRevision(None, dirty=False)
names = st.sampled_from(["a", "b"])
tags = st.sampled_from(["prod", "next"])


class Registry(RuleBasedStateMachine):
    """The model: by model name the value of each version's tensor, which are removed, and where each tag stood."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.repository = Repository.create(f"{self.folder}/here")
        self.other, self.pushed = Repository.create(f"{self.folder}/there"), {}
        self.values = {"a": [], "b": []}
        self.removed = {"a": set(), "b": set()}
        self.moves = {"a": {}, "b": {}}

    def teardown(self):
        shutil.rmtree(self.folder)

    def living(self, name):
        return [n for n in range(1, len(self.values[name]) + 1) if n not in self.removed[name]]

    def standing(self, name):
        return {tag: moves[-1] for tag, moves in self.moves[name].items() if moves[-1]}

    @initialize()
    def begin(self):
        for name in ("a", "b"):
            self.save(name, 0, None)

    @rule(name=names, value=st.integers(0, 3), parent=st.none() | st.tuples(names, st.integers(1, 4)))
    def save(self, name, value, parent):
        # 64 KiB and a scalar: an object of its own, mostly a difference to the parent's, and one in a pack.
        tensor = torch.arange(16_384.0)
        tensor[:100] += value

        def store():
            return save(
                self.repository, name, {"w": tensor, "v": torch.tensor(value)}, step=value, code=NO_CODE,
                environment={}, metrics={"score": value}, parent=parent and f"{parent[0]}@{parent[1]}",
            )  # fmt: skip

        if parent and 0 < len(self.values[parent[0]]) < parent[1]:
            with pytest.raises(NotFoundError):
                store()
            return
        made = store()
        self.values[name].append(value)
        assert made.version == len(self.values[name])

    @rule(name=names, tag=tags, number=st.integers(1, 5), expect=st.none() | st.integers(0, 5))
    def tag(self, name, tag, number, expect):
        now = self.standing(name).get(tag, 0)
        try:
            self.repository.tag("models", f"{name}@{number}", tag, expect=expect)
        except NotFoundError:
            assert number not in self.living(name)
        except ConflictError:
            assert expect not in (None, now)
        else:
            assert number in self.living(name)
            assert expect in (None, now)
            if now != number:
                self.moves[name].setdefault(tag, []).append(number)

    @rule(name=names, tag=tags)
    def untag(self, name, tag):
        if tag not in self.standing(name):
            with pytest.raises(NotFoundError):
                self.repository.untag("models", name, tag)
            return
        self.repository.untag("models", name, tag)
        self.moves[name][tag].append(None)

    @rule(name=names, number=st.integers(1, 5), force=st.booleans())
    def remove(self, name, number, force):
        on_it = [tag for tag, version in self.standing(name).items() if version == number]
        try:
            remove(self.repository, [f"{name}@{number}"], force=force)
        except NotFoundError:
            assert number not in self.living(name)
        except ConfigError:
            assert on_it
            assert not force
        else:
            assert number in self.living(name)
            assert force or not on_it
            self.removed[name].add(number)
            for tag in on_it:
                self.moves[name][tag].append(None)

    @precondition(lambda self: all(self.living(name) for name in ("a", "b")))
    @rule(name=names, last=st.integers(1, 2))
    def retain(self, name, last):
        living = self.living(name)
        _, plan = retain(self.repository, name, RetentionPolicy(last=last, metric="score", mode="max"), dry_run=False)
        best = max(living, key=lambda number: (self.values[name][number - 1], number))
        kept = {*living[-last:], best, *self.standing(name).values()}
        assert set(plan.removed) == set(living) - kept
        self.removed[name] |= set(plan.removed)

    @rule()
    def collect(self):
        gc_at(self.repository, time.time() + GRACE_S + 60, dry_run=False)

    @rule(name=names, number=st.integers(1, 6))
    def restore(self, name, number):
        ref = f"{name}@{number}"
        if number not in self.living(name):
            with pytest.raises(
                NotFoundError, match="was removed" if number in self.removed[name] else "has no version"
            ):
                restore(self.repository, ref)
            return
        state = restore(self.repository, ref).state
        value = self.values[name][number - 1]
        assert state["v"].item() == value
        assert state["w"][:100].tolist() == [float(place + value) for place in range(100)]

    @rule(name=names, number=st.integers(1, 5))
    def push(self, name, number):
        if number not in self.living(name):
            with pytest.raises(NotFoundError):
                transfer(self.repository, self.other, [f"{name}@{number}"])
            return
        (there,) = transfer(self.repository, self.other, [f"{name}@{number}"]).versions
        assert there.is_new == ((name, number) not in self.pushed)
        assert self.pushed.setdefault((name, number), there.target) == there.target
        assert restore(self.other, str(there.target)).state["v"].item() == self.values[name][number - 1]

    @rule(name=names, tag=tags, back=st.integers(0, 2))
    def follow(self, name, tag, back):
        moves = self.moves[name].get(tag, [])
        place = moves[-1 - back] if back < len(moves) else None
        ref = f"{name}@{tag}~{back}"
        if place is None or place in self.removed[name]:
            with pytest.raises(NotFoundError):
                self.repository.resolve("models", ref)
        else:
            assert self.repository.resolve("models", ref).version == place

    @rule(value=st.integers(0, 3))
    def find(self, value):
        found = {str(version) for version in find_versions(self.repository, f"step >= {value}")}
        assert found == {f"{n}@{v}" for n in ("a", "b") for v in self.living(n) if self.values[n][v - 1] >= value}

    @invariant()
    def logs_and_tags_say_what_the_model_says(self):
        for name, values in self.values.items():
            if values:
                log = model_log(self.repository, name)
                assert [each.entry["step"] for each in log] == values
                assert {each.version for each in log if each.removed} == self.removed[name]
                assert {tag: each.version for each in log for tag in each.tags} == self.standing(name)


TestRegistry = Registry.TestCase
TestRegistry.settings = examples(12, stateful_step_count=14, deadline=None)
