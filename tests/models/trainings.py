"""Trainings of loaders that write down what they really served, and commit versions that say what they consumed."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from datasvc.loaders.core.mixture import splits_of
from datasvc.models import ConsumptionTracker
from datasvc.order import OrderConfig
from tests.loaders.numbered import Numbers


def commit(repository, name, step, uses, **fields):
    """Commit a version of which only the entry matters; returns its name."""
    entry = {
        "step": step, "data": [use if isinstance(use, dict) else use.to_dict() for use in uses], "parent": None,
        "config": {}, "metrics": {}, "message": "", "code": {"revision": None, "dirty": False}, **fields,
    }  # fmt: skip
    return f"{name}@{repository.versions('models', name).append(lambda _head: entry).number}"


@dataclass(frozen=True)
class Batches:
    """How a run reads: samples per rank and step, ranks, tail."""

    size: int = 2
    ranks: int = 1
    tail: str = "drop"


@dataclass
class Truth:
    """What each version's own training consumed, and how it is reached.

    Attributes:
        own: by version, how often `(key, data, epoch, position, step)` was consumed.
        parents: by version.
        states: by version, the loader's state and what it was of.
        steps: by version.
    """

    own: dict[str, Counter] = field(default_factory=dict)
    parents: dict[str, list[str]] = field(default_factory=dict)
    states: dict[str, tuple[Any, Any, dict]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    def add(self, version, own, parents, state=None, step=0):
        self.own[version], self.parents[version] = own, parents
        self.states[version], self.steps[version] = state, step

    def seen_by(self, version):
        """Return all that a version has behind it, each ancestor counted once."""
        names, line = {version}, [version]
        while line:
            further = [parent for parent in self.parents[line.pop()] if parent not in names]
            names |= set(further)
            line += further
        return sum((self.own[name] for name in names), Counter())


class Run:
    """A process of training, with a loader for each of its ranks, driven step by step.

    Args:
        repository: where versions go.
        truth: what is written down.
        name: of the model.
        samples: a split or mixture.
        order: of the loaders.
        batches: how they read.
        resumed: version that it goes on from, loader and all; None: the loader begins anew.
        base: version whose weights it begins with; `resumed` by default.
        masked: samples to mask, beside those of the version that it goes on from.
    """

    def __init__(
        self,
        repository,
        truth,
        name,
        samples,
        *,
        order=None,
        batches=None,
        resumed=None,
        base=None,
        step=None,
        masked=None,
    ):
        self.repository, self.truth, self.name, self.samples = repository, truth, name, samples
        self.order, self.masked = order or OrderConfig(seed=7), masked
        self.version = resumed or base
        self.step = truth.steps.get(self.version, 0) if step is None else step
        self.served = Counter()
        self._open(batches or Batches(), truth.states[resumed][2] if resumed else None)
        self.reading = ConsumptionTracker(self.loaders[0], step=self.step)

    def train(self, num_steps):
        """Take so many optimizer steps, over the ends of epochs."""
        while num_steps:
            batches = [next(each, None) for each in self.under_way]
            if batches[0] is None:
                assert batches == [None] * len(batches)
                self.under_way = [iter(loader) for loader in self.loaders]
                continue
            self.step += 1
            num_steps -= 1
            for batch, numbers in batches:
                self._write_down(batch, numbers)

    def resize(self, batches):
        """Go on at another size in the same process, as an elastic job does."""
        self._open(batches, self.loaders[0].state_dict())
        self.reading.switch_loader(self.loaders[0], step=self.step)

    def save(self, **fields):
        """Commit a version that continues the last one; returns its name."""
        parents = [self.version] if self.version else []
        version = commit(
            self.repository, self.name, self.step, [self.reading.use()], parent=self.version, **fields
        )  # fmt: skip
        state = (self.samples, self.order, self.loaders[0].state_dict())
        self.truth.add(version, self.served, parents, state, self.step)
        self.version, self.served = version, Counter()
        return version

    def _open(self, batches, state):
        self.loaders = [
            Numbers(
                self.samples, batches.size, rank=rank, world_size=batches.ranks, order=self.order, tail=batches.tail,
                prefetch=0, masked=self.masked,
            )
            for rank in range(batches.ranks)
        ]  # fmt: skip
        for loader in self.loaders:
            if state is not None:
                loader.load_state_dict(state)
        self.under_way = [iter(loader) for loader in self.loaders]

    def _write_down(self, batch, numbers):
        names = [f"{split.dataset}/{split.name}" for split in splits_of(self.samples)]
        rows = zip(numbers, batch.sources.tolist(), batch.positions.tolist(), batch.mask.tolist(), strict=True)
        for number, source, position, counts in rows:
            if counts:
                self.served[str(number), names[source], batch.epoch, position, self.step] += 1
