"""Finds which positions a step of a run consumed, from the entries of model versions. No sample is read here.

The data uses of a version and of its ancestors tie steps to positions. A step after the last version of a run is in
no entry: it is then taken from where that version stopped, as the same run would have continued.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from datasvc.errors import NotFoundError
from datasvc.ledger.leases import Leases, Round
from datasvc.ledger.masked import Masked, masks_of
from datasvc.ledger.skipped_steps import StepCursor
from datasvc.models.provenance.consumed_ranges import EpochPart, ReadOrder, parse_use, parts_of, training_uses
from datasvc.models.provenance.segments import Consumed, plan_segments
from datasvc.models.registry.ancestry import read_ancestry
from datasvc.models.versions.data_use import Cursor, DataUse, ReadSpan
from datasvc.models.versions.entry_reader import EntryReader
from datasvc.order import Tail
from datasvc.repository import Digest, Repository
from datasvc.runs.reader import resolve_run
from datasvc.shards.format.shard_table import ShardTable


@dataclass(frozen=True)
class RecordedStep:
    """The batch of a step, by positions.

    Attributes:
        step: the optimizer step, counted from 1.
        version: version whose entry has the step; for a step after it, the last one of the run.
        run: log of the run, such as "digits-cnn/20260101-000000-0001"; None: not recorded.
        use: data use that has the step.
        epoch: epoch of the batch.
        start: first position of the batch in the epoch.
        stop: position after it.
        num_samples: samples of an epoch.
        global_batch: samples of a step over all ranks.
        tail: treatment of samples that do not fill a global batch.
        ranks: number of data ranks; None: not recorded.
        version_step: step of the version; None: not recorded.
        is_recorded: False for a step after the version.
        batches: with leases, the positions of each data rank in this step, none for a rank whose run has ended; None:
            the ranks divide the global batch.
    """

    step: int
    version: str
    run: str | None
    use: DataUse
    epoch: int
    start: int
    stop: int
    num_samples: int
    global_batch: int
    tail: Tail
    ranks: int | None
    version_step: int | None = None
    is_recorded: bool = True
    batches: tuple[range, ...] | None = None

    @property
    def masked(self) -> Masked:
        """The samples that the run masked."""
        return masks_of(self.use.state)


def find_step(repository: Repository, ref: str, step: int) -> RecordedStep:
    """Return a step of the training of a version, or of one that it continues.

    Args:
        repository: repository of the version.
        ref: model version, such as "digits-cnn@3".
        step: the step, counted from 1.

    Raises:
        NotFoundError: the version does not exist, or no entry has the step; the message says why.
        ConfigError, CorruptDataError, UnavailableError: an entry is not valid or cannot be read.
    """
    version = str(repository.resolve("models", ref, removed=True))
    ancestry = read_ancestry(repository, [version])
    planned = plan_segments(ancestry)
    names = [version, *(ancestor.name for ancestor in ancestry.ancestors_of(version))]
    for name in names:
        for consumed in reversed(planned[name].consumed):
            found = _find_in(repository, consumed, ancestry.versions[name].entry.get("run"), step)
            if found is not None:
                return found
    last = ancestry.versions[version].step
    gaps = [gap for name in names for gap in planned[name].gaps]
    reason = f" ({'; '.join(gaps)})" if gaps else ""
    raise NotFoundError(
        f"{version} records no step {step}; it is of step {last}{reason}: give a step from 1 to {last}"
    )


def find_run_step(repository: Repository, ref: str, step: int) -> RecordedStep:
    """Return a step of a run, also one that is after its last version.

    Args:
        repository: repository of the run.
        ref: the log of the run, as for `resolve_run`.
        step: the step, counted from 1.

    Raises:
        NotFoundError: there is no such run, or no version of it records what it read.
        ConfigError, CorruptDataError, UnavailableError: an entry is not valid or cannot be read.
    """
    name, run_id = resolve_run(repository, ref)
    run = f"{name}/{run_id}"
    of_run = {
        entry.number: entry.content.get("step")
        for entry in EntryReader(repository).entries(name)
        if entry.content.get("run") == run
    }
    steps = {number: found for number, found in of_run.items() if type(found) is int}
    if not steps:
        raise NotFoundError(
            f"the run {run} has no version, and only versions record what was read; replay a step of a run with "
            "checkpoints, such as --checkpoint-every 10m"
        )
    later = [number for number, found in steps.items() if found >= step]
    if later:
        # The newest, because after the loss of a rank, no version may continue one that was saved before.
        return find_step(repository, f"{name}@{max(later)}", step)
    return _continue(repository, f"{name}@{max(steps)}", run, step)


def _find_in(repository: Repository, consumed: Consumed, run: str | None, step: int) -> RecordedStep | None:
    """Return the step if a segment has it."""
    span = consumed.segment.span
    if span.step is None or span.step >= step or span.global_batch is None or span.tail is None:
        return None
    num_samples = count_samples(repository, consumed.segment.order)
    for part in parts_of(consumed.segment, num_samples):
        if part.step is None:
            continue
        if span.leases is not None and span.ranks is not None:
            found = _find_in_round(part, span.leases, span.global_batch // span.ranks, span.ranks, step)
            if found is not None:
                recorded = _recorded(step, consumed.version, run, consumed.use, span, (part.epoch, 0), num_samples)
                start, stop = found[0].start, found[0].stop
                batches = tuple(found[0].batch_of(rank, found[1]) for rank in range(span.ranks))
                return replace(recorded, start=start, stop=stop, batches=batches)
            continue
        start = part.first + (step - 1 - part.step) * span.global_batch
        if part.start <= start < part.stop:
            return _recorded(step, consumed.version, run, consumed.use, span, (part.epoch, start), num_samples)
    return None


def _find_in_round(
    part: EpochPart, leases: Leases, batch_size: int, ranks: int, step: int
) -> tuple[Round, int] | None:
    """Return the round of an epoch that has a step, and the number of the step in it; None: another part has it."""
    assert part.step is not None
    if step <= part.step:
        return None
    found = leases.round_of_step(step - 1 - part.step, part.first, part.num_samples, batch_size, ranks)
    return found if found is not None and part.start <= found[0].start < part.stop else None


def _continue(repository: Repository, version: str, run: str, step: int) -> RecordedStep:
    """Return a step after the last version of a run."""
    resolved = repository.resolve("models", version, removed=True)
    entry = repository.entry(resolved).content
    uses = training_uses([DataUse.from_dict(use) for use in entry.get("data") or ()])
    spans = uses[0].spans if len(uses) == 1 else ()
    if not spans or spans[-1].global_batch is None or spans[-1].tail is None:
        raise NotFoundError(
            f"{version}, the last version of {run}, does not record its batches, so step {step} is "
            "unknown; save with data=[tracker.use()] of a ConsumptionTracker"
        )
    (use,), span = uses, spans[-1]
    if span.leases is not None:
        raise NotFoundError(
            f"{version}, the last version of {run}, is of step {entry.get('step')}, and which replica had which "
            f"samples in the rounds after it is in no version: give a step up to {entry.get('step')}"
        )
    order, cursor = parse_use(use)
    num_samples = count_samples(repository, order)
    assert span.global_batch is not None
    assert span.tail is not None
    steps = StepCursor(int(entry["step"]), cursor, num_samples, span.global_batch, span.tail)
    _, epoch, start, _ = next(steps.ranges(step, step))
    found = _recorded(step, version, run, use, span, (epoch, start), num_samples)
    return replace(found, version_step=steps.step, is_recorded=False)


def _recorded(
    step: int,
    version: str,
    run: str | None,
    use: DataUse,
    span: ReadSpan,
    cursor: Cursor,
    num_samples: int,
) -> RecordedStep:
    assert span.global_batch is not None
    assert span.tail is not None
    epoch, start = cursor
    stop = min(start + span.global_batch, num_samples)
    return RecordedStep(
        step, version, run, use, epoch, start, stop, num_samples, span.global_batch, span.tail, span.ranks
    )


def count_samples(repository: Repository, order: ReadOrder) -> int:
    """Return the samples of an epoch of an order. Raises NotFoundError: its data is not in the repository."""
    if order.mix is not None:
        return order.mix.epoch_samples
    return read_recorded_table(repository, order.tables[0], order.names[0]).num_positions


def read_recorded_table(repository: Repository, digest: Digest, name: str) -> ShardTable:
    """Return a shard table that a run read. Raises NotFoundError: it is not in the repository."""
    try:
        return ShardTable.read(repository.objects, digest)
    except NotFoundError as error:
        raise NotFoundError(
            f"{name}, which the run read, is no longer in {repository.url}: its shard table {digest[:12]}... was "
            "removed since; replay it in a repository that has the version"
        ) from error
