"""Plans how a model forgets samples: from its last version that was not trained on them, with the samples masked.

The order is by position and a resume is exact, so training from that version gives the weights, to the last bit, of a
run that had masked the samples from its beginning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from datasvc.errors import ConfigError, NotFoundError
from datasvc.ledger.leases import Leases
from datasvc.ledger.masked import NOTHING_MASKED, Masked, masks_of
from datasvc.models.provenance.consumed_ranges import parse_use, training_uses
from datasvc.models.provenance.find_consumers import find_consumers
from datasvc.models.provenance.key_lookup import find_places
from datasvc.models.provenance.sample_query import query_keys, read_tables
from datasvc.models.provenance.segments import plan_segments
from datasvc.models.registry.ancestry import Ancestry, read_ancestry
from datasvc.printable import count_text
from datasvc.repository import Digest, Repository, Resolved
from datasvc.shards.versions.deletions import stored_rows_of

_MAX_NAMES = 5


@dataclass(frozen=True)
class RepeatedSteps:
    """Consecutive steps to take again, which a run took with one batch size and number of ranks.

    Attributes:
        stop_step: last of the steps; the first one follows those before.
        global_batch: samples of a step over all ranks; None: not recorded.
        ranks: number of data ranks; None: not recorded.
        leases: how their rounds were divided among replicas; None: each step had a global batch.
    """

    stop_step: int
    global_batch: int | None
    ranks: int | None
    leases: Leases | None = None


@dataclass(frozen=True)
class ForgetPlan:
    """How a model forgets samples.

    Attributes:
        model: version that is to forget them, such as "pets-cnn@9".
        num_samples: number of requested samples that it was trained on; 0: it has nothing to forget.
        start: version to continue, the last one before the first of them; None: the run starts again.
        first_step: first optimizer step that had one of the samples; None if the records do not have steps.
        start_step: optimizer steps of `start`; 0 without one.
        stop_step: optimizer steps of `model`.
        removed: versions that would save steps, but were removed, nearest first.
        masked: the samples, and what the run has masked before, as the loader of the training masks them.
        repeated: the steps to take again, in order; () if an entry does not record them.
    """

    model: str
    num_samples: int
    start: str | None
    first_step: int | None
    start_step: int
    stop_step: int
    removed: tuple[str, ...]
    masked: Masked
    repeated: tuple[RepeatedSteps, ...] = ()

    @property
    def num_steps(self) -> int:
        """Optimizer steps to take again: the cost."""
        return self.stop_step - self.start_step if self.num_samples else 0

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, without the places of the samples."""
        return {
            "model": self.model,
            "samples": self.num_samples,
            "start": self.start,
            "first_step": self.first_step,
            "start_step": self.start_step,
            "stop_step": self.stop_step,
            "steps": self.num_steps,
            "removed": list(self.removed),
            "repeated": [asdict(part) for part in self.repeated],
        }


def plan_forget(
    repository: Repository,
    ref: str,
    keys: Iterable[str],
    *,
    data: str | None = None,
    split: str | None = None,
    missing: Literal["fail", "ok"] = "fail",
) -> ForgetPlan:
    """Return how a model version forgets samples.

    Args:
        repository: repository of the model and of its data.
        ref: model, for its newest version, or a version.
        keys: keys of the samples.
        data: data set, or version of one, in which the keys are searched; None: all that the model read.
        split: name of the splits in which the keys are searched; None: all.
        missing: keys that are in no data that the model read: "fail", or "ok" to leave them out.

    Raises:
        ConfigError: a version of another model that this one continues was trained on a sample, or it is unknown what
            a part of the training consumed; or a reference is not valid.
        NotFoundError: there is no such version, or a key is in no data that the model read.
        CorruptDataError, UnavailableError: see `find_consumers`.
    """
    version = repository.resolve("models", ref)
    name = str(version)
    report = find_consumers(repository, [name], keys=keys, data=data, split=split)
    if len(report.missing) and missing != "ok":
        raise NotFoundError(
            f"{count_text(len(report.missing), 'key is', 'keys are')} in no data that {name} read: "
            f"{', '.join(report.keys[number] for number in report.missing[:_MAX_NAMES].tolist())}"
            f"{', ...' if len(report.missing) > _MAX_NAMES else ''}; nothing was done (--missing ok leaves them out)"
        )
    ancestry = read_ancestry(repository, [name])
    if report.gaps:
        gap = next(iter(report.gaps.items()))
        raise ConfigError(f"it is unknown what {gap[0]} was trained on, so no start is safe: {gap[1][0]}")
    exposed = {ancestor for ancestor, bits in report.seen.items() if bits.any()}
    num_samples = next(uses.num_samples for uses in report.versions if uses.name == name)
    start, removed = _choose_start(repository, ancestry, version, exposed)
    steps = [use.step for use in report.all_uses()]
    masked = _find_masked(repository, _splits_of(ancestry, name), report.keys, data=data, split=split)
    for use in training_uses(ancestry.versions[name].uses):
        masked |= masks_of(use.state)  # what the run has forgotten or skipped before stays so
    return ForgetPlan(
        name,
        num_samples,
        start,
        None if not steps or None in steps else min(step for step in steps if step is not None),
        0 if start is None else ancestry.versions[start].step or 0,
        ancestry.versions[name].step or 0,
        removed,
        masked,
        _find_repeated(ancestry, name, start) if num_samples else (),
    )


def _find_repeated(ancestry: Ancestry, name: str, start: str | None) -> tuple[RepeatedSteps, ...]:
    """Return the steps of a run after a version; () if an entry does not record them."""
    path = [name, *(version.name for version in ancestry.ancestors_of(name))]
    path = (
        path[: path.index(start)] if start in path else [each for each in path if _model_of(each) == _model_of(name)]
    )
    planned = plan_segments(ancestry)
    found: list[RepeatedSteps] = []
    for segment in (consumed.segment for each in reversed(path) for consumed in planned[each].consumed):
        span = segment.span
        if segment.stop_step is None:
            return ()
        part = RepeatedSteps(segment.stop_step, span.global_batch, span.ranks, span.leases)
        if found and replace(found[-1], stop_step=part.stop_step) == part:
            found.pop()
        found.append(part)
    return tuple(found)


def _model_of(name: str) -> str:
    return name.partition("@")[0]


def _choose_start(
    repository: Repository, ancestry: Ancestry, version: Resolved, exposed: Collection[str]
) -> tuple[str | None, tuple[str, ...]]:
    """Return the nearest version of the run that is not exposed, and nearer ones that were removed."""
    removed: list[str] = []
    for ancestor in ancestry.ancestors_of(str(version)) if str(version) in exposed else ():
        model, _, number = ancestor.name.partition("@")
        if model != version.name:
            if ancestor.name in exposed:
                raise ConfigError(
                    f"{ancestor.name}, which {version} continues, was trained on the samples: let {model} forget "
                    f"them first, then train {version.name} again from its new version"
                )
            break  # the run of this model starts from there
        if ancestor.name not in exposed:
            if not repository.removals("models", model).removed([int(number)]):
                return ancestor.name, tuple(removed)
            removed.append(ancestor.name)
    return None, tuple(removed)


def _splits_of(ancestry: Ancestry, name: str) -> dict[Digest, set[str]]:
    """Return the shard tables of the splits that a version was trained on, with the names of the splits."""
    found: dict[Digest, set[str]] = {}
    for use in training_uses(ancestry.versions[name].uses):
        order, _ = parse_use(use)
        for table, split in zip(order.tables, order.names, strict=True):
            found.setdefault(table, set()).add(split)
    return found


def _find_masked(
    repository: Repository,
    splits: Mapping[Digest, Collection[str]],
    keys: Iterable[str],
    *,
    data: str | None = None,
    split: str | None = None,
) -> Masked:
    """Return the samples with the given keys, as a loader masks them.

    Args:
        repository: repository of the data.
        splits: names of the splits, such as "pets@3/train", by the digest of their shard table.
        keys: keys of the samples; those that no split has are left out.
        data: data set, or version of one, in which the keys are searched; None: all splits.
        split: name of the splits in which the keys are searched; None: all.

    Raises:
        NotFoundError: a shard table, or a shard or the deletions of a split, are not in the repository.
        ConfigError, CorruptDataError, UnavailableError: see `find_places`.
    """
    query = query_keys(repository, keys, data=data, split=split)
    chosen = [table for table, names in splits.items() if query.matches_whole_split(names, table)]
    tables = read_tables(repository.objects, chosen)
    if absent := [" ".join(splits[digest]) for digest, table in tables.items() if table is None]:
        raise NotFoundError(f"the shard table of {absent[0]} is not in this repository; pull the data set")
    present = {digest: table for digest, table in tables.items() if table is not None}
    masked = NOTHING_MASKED
    for digest, places in find_places(repository.objects, present, query.keys).items():
        if places.lost:
            raise NotFoundError(f"shards of {' '.join(splits[digest])} are not in this repository; pull the data set")
        stored = stored_rows_of(repository.objects, present[digest], places.shards, places.rows)
        rows = {shard: stored[places.shards == shard].tolist() for shard in np.unique(places.shards).tolist()}
        masked |= Masked.rows(digest, rows)
    return masked
