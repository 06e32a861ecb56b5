"""Computes the ranges of positions (segments) that each version added to those of its ancestors, and the gaps.

An entry records the whole run up to its version. So that no sample counts twice, a version adds only the segments
that its nearest ancestor with the same run and order does not have. A gap is a line of text that says which
consumption is unknown. A version may be copied to another repository without its ancestors: the field `history` of
its entry there has the segments and gaps of the ancestors. `history_of` computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.mix_schedule import stem_of
from datasvc.models.provenance.consumed_ranges import ReadOrder, Segment, own_segments, parse_use, training_uses
from datasvc.models.registry.ancestry import HISTORY, Ancestry, Version, read_ancestry
from datasvc.models.versions.data_use import Cursor, DataUse, ReadSpan, cursor_of
from datasvc.models.versions.entry_reader import EntryReader
from datasvc.repository import Repository

_ELSEWHERE: Final = " elsewhere"  # follows the name of a version that is only in another repository
# The id of a run, or None for any run; and a read order, without the stages of a mixture, which a run may change.
_RunOrder = tuple[str | None, ReadOrder]


class Consumed(NamedTuple):
    """A segment, and the version whose training consumed it.

    Attributes:
        version: name of the version; "digits-cnn@3 elsewhere" for an ancestor that is only in another repository.
        segment: range that was consumed.
        use: data use that records it.
    """

    version: str
    segment: Segment
    use: DataUse


@dataclass(frozen=True)
class PlannedVersion:
    """Consumption that a version adds to that of its ancestors in this repository.

    Attributes:
        consumed: segments of its own training, and of ancestors that are only in another repository.
        gaps: unknown parts of its consumption, one line each.
    """

    consumed: tuple[Consumed, ...]
    gaps: tuple[str, ...]


def plan_segments(ancestry: Ancestry) -> dict[str, PlannedVersion]:
    """Return the segments that each version added, parents before children; an invalid record becomes a gap."""
    # By version: for each run and order, the use of this version if it has one, else that of its nearest ancestor.
    nearest_uses: dict[str, dict[_RunOrder, DataUse]] = {}
    planned: dict[str, PlannedVersion] = {}
    for name, version in ancestry.versions.items():
        ancestor_uses = _merged([nearest_uses[parent] for parent in version.parents])
        # For ancestors that are only in another repository, use their records in the entry's history.
        ancestor_uses |= _by_run_order(_history_uses(version))
        planned[name] = _plan(ancestry, version, ancestor_uses)
        # For its children, this version is the nearest ancestor: its uses replace those of its own ancestors.
        nearest_uses[name] = ancestor_uses | _by_run_order(training_uses(version.uses))
    return planned


def history_of(repository: Repository, ref: str, *, entries: EntryReader | None = None) -> list[dict[str, Any]]:
    """Return the segments and gaps of a version's ancestors as JSON values; several calls may share `entries`.

    A push or pull of the version calls this. The result becomes the field `history` of the version's entry in a
    repository without its ancestors, because there the names of its parents may belong to other versions.

    Raises:
        ConfigError, NotFoundError, CorruptDataError, UnavailableError: see `read_ancestry`.
    """
    version = str(repository.resolve("models", ref, removed=True))
    ancestry = read_ancestry(repository, [version], entries=entries)
    planned = plan_segments(ancestry)
    copied_version = ancestry.versions[version]
    # Leave out the segments of the version's own training: the field `data` of its entry has them.
    inherited: list[Consumed] = [item for item in planned[version].consumed if item.version != version]
    gaps = [(version, gap) for gap in copied_version.gaps]
    for ancestor in reversed(list(ancestry.ancestors_of(version))):  # oldest first, so that `_join` can join spans
        inherited += planned[ancestor.name].consumed
        gaps += [(ancestor.name, gap) for gap in planned[ancestor.name].gaps]
    gaps += [(str(item.get("version")), str(item["gap"])) for item in copied_version.history if "gap" in item]
    return [
        *map(_history_dict, _join(inherited)),
        *({"version": name, "gap": gap} for name, gap in dict.fromkeys(gaps)),
    ]


def _plan(ancestry: Ancestry, version: Version, ancestor_uses: Mapping[_RunOrder, DataUse]) -> PlannedVersion:
    """Return what a version adds. `ancestor_uses`: for each run and order, the use of the nearest ancestor."""
    gaps = list(version.gaps)
    consumed: list[Consumed] = []
    for item in version.history:
        try:
            consumed += _read_history(item)
        except (ConfigError, CorruptDataError) as error:
            gaps.append(str(error))
        if "gap" in item:
            gaps.append(f"{item.get('version')}, in another repository: {item['gap']}")
    uses = training_uses(version.uses)
    for use in uses:
        try:
            # Spans are compared with those of the same run only, because another run may have read the same order.
            order = _order_of(use)
            earlier = None if order is None else ancestor_uses.get((use.run if use.spans else None, order))
            if not _is_start_known(ancestry, version, use, ancestor_uses):
                gaps.append(
                    f"its run began at step {use.spans[0].step}, but no version that it continues has this step: "
                    "the samples that its weights consumed before this step are unknown"
                )
            segments = own_segments(use, earlier, step=version.step)
            consumed += [Consumed(version.name, segment, use) for segment in segments]
            if earlier is not None and use.run is not None and cursor_of(use.state) < cursor_of(earlier.state):
                gaps.append(
                    "its position is before that of the version it continues: all samples that the continued version "
                    "consumed count for it as well"
                )
        except (ConfigError, CorruptDataError) as error:
            gaps.append(f"its record of reading {use.dataset}/{use.split} is not valid: {error}")
    if not uses and not consumed and _has_own_steps(ancestry, version):
        gaps.append("it does not record the data that its steps consumed")
    return PlannedVersion(tuple(consumed), tuple(gaps))


def _is_start_known(
    ancestry: Ancestry, version: Version, use: DataUse, ancestor_uses: Mapping[_RunOrder, DataUse]
) -> bool:
    """Return whether it is known which version the run of `use` continued.

    Also True if the run began at step 0, or if its first step is not recorded.
    """
    step = use.spans[0].step if use.spans else None
    if not step:
        return True
    if HISTORY in version.entry or (version.gaps and not version.parents):
        return True  # the history or a gap describes the versions that the run continued
    # If an ancestor is of the same run, this version's record continues the ancestor's record.
    if any(run == use.run for run, _ in ancestor_uses if run is not None):
        return True
    steps = {ancestry.versions[parent].step for parent in version.parents}
    return step in steps or None in steps  # a parent whose step is unknown may have this step


def _has_own_steps(ancestry: Ancestry, version: Version) -> bool:
    """Return whether a version has more steps than its parents, or unknown steps.

    An average or a copy of versions has no steps of its own, so it needs no record of data.
    """
    steps = [ancestry.versions[parent].step for parent in version.parents]
    return version.step is None or version.step > max((step for step in steps if step is not None), default=0)


def _by_run_order(uses: Sequence[DataUse]) -> dict[_RunOrder, DataUse]:
    """Return the valid uses by (run, order), and also by (None, order), to find a use by its order alone."""
    by_run: dict[_RunOrder, DataUse] = {}
    for use in uses:
        order = _order_of(use)
        if order is not None:
            by_run[None, order] = use
            if use.run is not None and use.spans:
                by_run[use.run, order] = use
    return by_run


def _merged(parents: Sequence[Mapping[_RunOrder, DataUse]]) -> dict[_RunOrder, DataUse]:
    """Merge the uses of several parents; for each run and order, keep the use with the highest position."""
    merged = dict(parents[0]) if parents else {}
    for uses in parents[1:]:
        for key, use in uses.items():
            if key not in merged or cursor_of(use.state) > cursor_of(merged[key].state):
                merged[key] = use
    return merged


def _history_uses(version: Version) -> list[DataUse]:
    """Return the data uses of ancestors that are only in another repository, one per run."""
    # Build one data use with all spans for each run: the entry of a version in this repository has such uses.
    consumed_by_run: dict[str, list[Consumed]] = {}
    for item in version.history:
        try:
            for consumed in _read_history(item):
                consumed_by_run.setdefault(consumed.use.run or "", []).append(consumed)
        except (ConfigError, CorruptDataError):
            continue  # `_plan` adds a gap for this item
    return [
        replace(items[-1].use, spans=tuple(item.segment.span for item in items))
        for run, items in consumed_by_run.items()
        if run  # the spans of uses without a run may be of several runs
    ]


def _order_of(use: DataUse) -> ReadOrder | None:
    """Return the read order with which the run of a use began; None if its record is not valid.

    `_plan` adds a gap for a record that is not valid.
    """
    try:
        return parse_use(replace(use, state=stem_of(use.state)))[0]
    except (ConfigError, CorruptDataError):
        return None


def _join(consumed: Sequence[Consumed]) -> Iterator[Consumed]:
    """Yield the segments, and join consecutive segments of the same run and span."""
    joined: dict[tuple[Any, ...], Consumed] = {}
    for item in consumed:
        span = item.segment.span
        key = (item.segment.order, span.start, span.step, span.global_batch, span.tail, item.use.run)
        previous = joined.get(key)
        if previous is not None and previous.segment.span.stop == item.segment.own_start:
            joined[key] = item._replace(segment=replace(item.segment, own_start=previous.segment.own_start))
        elif previous is None:
            joined[key] = item
        else:
            joined[*key, len(joined)] = item  # not consecutive: use another key, so that both are kept
    yield from joined.values()


def _history_dict(consumed: Consumed) -> dict[str, Any]:
    """Return a segment as JSON values, for the field `history` of an entry."""
    segment, use = consumed.segment, consumed.use
    return {
        "version": consumed.version.removesuffix(_ELSEWHERE),
        "dataset": use.dataset,
        "split": use.split,
        "state": dict(use.state),
        "run": use.run,
        "span": segment.span.to_dict(),
        "since": list(segment.own_start),
        "stop_step": segment.stop_step,
        **({} if use.loader is None else {"loader": dict(use.loader)}),
    }


def _read_history(item: Mapping[str, Any]) -> Iterator[Consumed]:
    """Yield the segment that `_history_dict` encoded as `item`, or nothing if `item` is a gap."""
    if "gap" in item:
        return
    use = DataUse.from_dict(item)
    try:
        own_start = _cursor(item["since"])
        span = ReadSpan.from_dict(item["span"])
        stop_step = item.get("stop_step")
        segment = Segment(parse_use(use)[0], span, own_start, stop_step if type(stop_step) is int else None)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"the history of a version is not valid: {error!r}; found {item!r}") from error
    if not span.start <= own_start <= span.stop:
        raise CorruptDataError(f"the history of a version is not valid: {own_start} is not in {span}")
    yield Consumed(f"{item.get('version')}{_ELSEWHERE}", segment, use)


def _cursor(pair: Sequence[int]) -> Cursor:
    epoch, position = pair
    return cursor_of({"epoch": epoch, "position": position})
