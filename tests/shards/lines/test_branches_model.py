"""Any sequence of commits to branches, merges and removals, against a model in memory: dictionaries of samples."""

import shutil
import tempfile

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from datasvc.errors import ConfigError, ConflictError
from datasvc.repository import Repository
from datasvc.repository.branching import create_branch, read_branches, remove_branch
from datasvc.repository.logs.references import LineName
from datasvc.repository.removal import remove_versions
from datasvc.shards import open_dataset
from datasvc.shards.history.merge_branch import merge_branch
from datasvc.shards.lines.commit import commit_on_line
from datasvc.shards.versions.combine import append_splits
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.version_entry import describe_tables, read_tables
from tests.examples import examples
from tests.shards.written_versions import TEXT_SCHEMA, write_table, write_version

BRANCHES = ("x", "y")
keys = st.text("abc", min_size=1, max_size=2)
contents = st.dictionaries(keys, st.sampled_from(["1", "2"]), min_size=1)
lines = st.sampled_from([None, *BRANCHES])


def three_way(ours, theirs, base):
    """Return the merged samples and the keys in conflict; a missing sample is None."""
    merged, conflicts = {}, set()
    for key in {*ours, *theirs, *base}:
        our, their, old = (side.get(key) for side in (ours, theirs, base))
        if len({our, their, old}) == 3:
            conflicts.add(key)
        merged[key] = their if our == old else our
    return {key: value for key, value in merged.items() if value is not None}, conflicts


class Lines(RuleBasedStateMachine):
    """The model: samples and parents of each version, and for each line that exists its versions, oldest first."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.repository = Repository.create(self.folder)
        self.samples, self.parents, self.removed = {}, {}, set()
        self.lines, self.starts = {}, {}

    def teardown(self):
        shutil.rmtree(self.folder)

    def head(self, line):
        own = [number for number in self.lines[line] if number not in self.removed]
        return own[-1] if own else self.starts[line]

    def commit(self, line, samples, *merged):
        number = len(self.samples) + 1
        self.parents[number] = [self.head(line), *merged]
        self.samples[number] = samples
        self.lines[line].append(number)

    def ref(self, line):
        return str(LineName("pets", line))

    @initialize(content=contents)
    def begin(self, content):
        write_version(self.repository, "pets", {"train": [self.rows(content)], "val": [self.rows({"v": "1"})]})
        self.samples[1], self.parents[1] = content, []
        self.lines[None] = [1]
        self.starts[None] = 1

    @rule(line=lines, branch=st.sampled_from(BRANCHES))
    def create(self, line, branch):
        if line not in self.lines:
            return
        if branch in self.lines:
            with pytest.raises(ConflictError, match="already"):
                create_branch(self.repository, self.ref(line), branch)
            return
        start = create_branch(self.repository, self.ref(line), branch).version
        assert start == self.head(line)
        self.lines[branch], self.starts[branch] = [], start

    @rule(branch=st.sampled_from(BRANCHES))
    def remove(self, branch):
        if branch in self.lines:
            remove_branch(self.repository, "pets", branch)
            del self.lines[branch], self.starts[branch]

    @rule(line=lines, content=contents)
    def append(self, line, content):
        if line not in self.lines:
            return
        objects = self.repository.objects
        new = {"train": write_table(objects, [self.rows(content)], TEXT_SCHEMA)}

        def build(parent):
            appended = append_splits(objects, read_tables(self.repository, parent), new, on_common="replace")
            return {
                "message": "",
                "splits": describe_tables(objects, appended),
                "parent": str(parent),
                "split_overlap": {},
            }

        commit_on_line(self.repository, LineName("pets", line), build)
        self.commit(line, {**self.samples[self.head(line)], **content})

    @rule(line=lines, chosen=st.sets(keys, min_size=1))
    def delete(self, line, chosen):
        if line not in self.lines:
            return
        left = {key: value for key, value in self.samples[self.head(line)].items() if key not in chosen}
        if left and left != self.samples[self.head(line)]:
            delete(self.repository, self.ref(line), keys=chosen, ignore_missing=True)
            self.commit(line, left)

    @rule(line=lines)
    def remove_head(self, line):
        if line not in self.lines or self.head(line) == 1:
            return
        number = self.head(line)
        if number in self.starts.values():
            with pytest.raises(ConfigError, match="begins at"):
                remove_versions(self.repository, "datasets", [f"pets@{number}"])
            return
        remove_versions(self.repository, "datasets", [f"pets@{number}"])
        self.removed.add(number)

    @rule(ours=lines, theirs=lines, rule=st.sampled_from(["fail", "ours", "theirs"]))
    def merge(self, ours, theirs, rule):
        if ours not in self.lines or theirs not in self.lines:
            return
        own, other = self.head(ours), self.head(theirs)
        bases = self.common_ancestors(own, other)
        if other in bases:
            assert not merge_branch(self.repository, self.ref(theirs), self.ref(ours)).is_new
            return
        results = [three_way(self.samples[own], self.samples[other], self.samples[base]) for base in bases]
        conflicts = set().union(*(found for _, found in results))
        conflicts |= {
            key
            for key in {*self.samples[own], *self.samples[other]}
            if len({merged.get(key) for merged, _ in results}) > 1
        }
        merged = dict(results[0][0])
        for key in conflicts:
            side = self.samples[own if rule == "ours" else other]
            merged.pop(key, None)
            merged |= {key: side[key]} if key in side else {}

        def act():
            return merge_branch(self.repository, self.ref(theirs), self.ref(ours), on_conflict=rule)

        if conflicts and rule == "fail":
            with pytest.raises(ConflictError, match="changed on both sides") as refused:
                act()
            assert all(f"train/{key}: " in str(refused.value) for key in sorted(conflicts)[:1])
            return
        report = act()
        assert {conflict.key for conflict in report.conflicts} == conflicts
        self.commit(ours, merged, other)

    def ancestors(self, number):
        pending, seen = [number], {number}
        while pending:
            new = set(self.parents[pending.pop()]) - seen
            seen |= new
            pending += new
        return seen

    def common_ancestors(self, ours, theirs):
        common = self.ancestors(ours) & self.ancestors(theirs)
        return {each for each in common if not any(each in self.ancestors(other) - {other} for other in common)}

    @invariant()
    def every_line_and_every_version_reads_as_the_model_says(self):
        repository = Repository.open(self.folder)
        if not self.samples:
            return
        heads = {line: self.head(line) for line in self.lines}
        assert repository.resolve("datasets", "pets").version == heads[None]
        branches = {name: state.head.version for name, state in read_branches(repository, "pets").items()}
        assert branches == {line: head for line, head in heads.items() if line}
        assert repository.state("datasets", "pets").newest == heads[None]
        for number in {*heads.values(), len(self.samples)} - self.removed:
            dataset = open_dataset(repository, f"pets@{number}")
            found = {sample["key"]: sample["text"] for sample in dataset["train"]} if "train" in dataset else {}
            assert found == self.samples[number]

    @staticmethod
    def rows(content):
        return [{"key": key, "text": value} for key, value in content.items()]


TestLines = Lines.TestCase
TestLines.settings = examples(60, stateful_step_count=14, deadline=None)
