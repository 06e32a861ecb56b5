"""What each version of an ancestry consumed itself, and what is not known of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.provenance.consumed_ranges import ReadOrder, Segment, own_segments, parse_use, trainings
from datasvc.models.registry.ancestry import HISTORY, Ancestry, Version, read_ancestry
from datasvc.models.versions.data_use import Cursor, DataUse, ReadSpan, cursor_of
from datasvc.models.versions.entry_reader import EntryReader
from datasvc.repository import Repository

_ELSEWHERE: Final = " elsewhere"
_Line = tuple[str | None, ReadOrder]


class Consumed(NamedTuple):
    """A segment, and the version whose training consumed it.

    Attributes:
        version: its name; "digits-cnn@3 elsewhere" of an ancestor that is in another repository only.
        segment: what was consumed.
        use: that says so.
    """

    version: str
    segment: Segment
    use: DataUse


@dataclass(frozen=True)
class Own:
    """What a version adds to its ancestors.

    Attributes:
        consumed: by its own training, and by ancestors that are in another repository.
        gaps: what is not known of it, a line each.
    """

    consumed: tuple[Consumed, ...]
    gaps: tuple[str, ...]


def plan_segments(ancestry: Ancestry) -> dict[str, Own]:
    """Return what each version added, parents before children. Never fails: what makes no sense is a gap."""
    nearest: dict[str, dict[_Line, DataUse]] = {}
    planned: dict[str, Own] = {}
    for name, version in ancestry.versions.items():
        before = _merged([nearest[parent] for parent in version.parents])
        before |= _by_line(_history_uses(version))
        planned[name] = _plan(ancestry, version, before)
        nearest[name] = before | _by_line(trainings(version.uses))
    return planned


def history_of(repository: Repository, ref: str, *, entries: EntryReader | None = None) -> list[dict[str, Any]]:
    """Return what the ancestors of a version consumed, as JSON values: the field `history` of its entry elsewhere.

    Whoever copies a version to a repository without its ancestors keeps it there: the names of its parents mean
    something else in that one. `entries` is for who asks several times.

    Raises:
        ConfigError, NotFoundError, CorruptDataError, UnavailableError: see `read_ancestry`.
    """
    version = str(repository.resolve("models", ref, removed=True))
    ancestry = read_ancestry(repository, [version], entries=entries)
    planned = plan_segments(ancestry)
    own = ancestry.versions[version]
    kept: list[Consumed] = [each for each in planned[version].consumed if each.version != version]
    gaps = [(version, gap) for gap in own.gaps]
    for above in reversed(list(ancestry.above(version))):
        kept += planned[above.name].consumed
        gaps += [(above.name, gap) for gap in planned[above.name].gaps]
    gaps += [(str(each.get("version")), str(each["gap"])) for each in own.history if "gap" in each]
    return [
        *map(_history_dict, _joined(kept)),
        *({"version": name, "gap": gap} for name, gap in dict.fromkeys(gaps)),
    ]


def _plan(ancestry: Ancestry, version: Version, earlier: Mapping[_Line, DataUse]) -> Own:
    gaps = list(version.gaps)
    consumed: list[Consumed] = []
    for item in version.history:
        try:
            consumed += _read_history(item)
        except (ConfigError, CorruptDataError) as error:
            gaps.append(str(error))
        if "gap" in item:
            gaps.append(f"{item.get('version')}, in another repository: {item['gap']}")
    uses = trainings(version.uses)
    for use in uses:
        try:
            # Of the run that made it where it says so; what others read in that order is no part of it.
            before = earlier.get((use.run if use.spans else None, parse_use(use)[0]))
            if not _is_joined(ancestry, version, use, earlier):
                gaps.append(
                    f"its run began at step {use.spans[0].step}, at which no version that it continues stands: what "
                    "its weights consumed before is not known"
                )
            segments = own_segments(use, before, step=version.step)
            consumed += [Consumed(version.name, segment, use) for segment in segments]
            if before is not None and use.run is not None and cursor_of(use.state) < cursor_of(before.state):
                gaps.append("it stands before the version that it continues: what that consumed counts for it too")
        except (ConfigError, CorruptDataError) as error:
            gaps.append(f"what it says of {use.dataset}/{use.split} cannot be used: {error}")
    if not uses and not consumed and _has_moved(ancestry, version):
        gaps.append("it does not say which data its steps consumed")
    return Own(tuple(consumed), tuple(gaps))


def _is_joined(ancestry: Ancestry, version: Version, use: DataUse, earlier: Mapping[_Line, DataUse]) -> bool:
    """Return whether what a run says of itself begins where a version that this one continues ends."""
    step = use.spans[0].step if use.spans else None
    if not step or HISTORY in version.entry or (version.gaps and not version.parents):
        return True  # anew; or nobody can tell, and that is said elsewhere
    if any(run == use.run for run, _ in earlier if run is not None):
        return True
    steps = {ancestry.versions[parent].step for parent in version.parents}
    return step in steps or None in steps


def _has_moved(ancestry: Ancestry, version: Version) -> bool:
    """Return whether a version has more steps behind it than all that it continues: averages and copies have not."""
    known = [ancestry.versions[parent].step for parent in version.parents]
    return version.step is None or version.step > max((step for step in known if step is not None), default=0)


def _by_line(uses: Sequence[DataUse]) -> dict[_Line, DataUse]:
    """Return uses by the run that made them and their order, and by their order alone."""
    found: dict[_Line, DataUse] = {}
    for use in uses:
        order = _order_of(use)
        if order is not None:
            found[None, order] = use
            if use.run is not None and use.spans:
                found[use.run, order] = use
    return found


def _merged(parents: Sequence[Mapping[_Line, DataUse]]) -> dict[_Line, DataUse]:
    """Return the uses behind several versions; of one run that which came further."""
    merged = dict(parents[0]) if parents else {}
    for uses in parents[1:]:
        for line, use in uses.items():
            if line not in merged or cursor_of(use.state) > cursor_of(merged[line].state):
                merged[line] = use
    return merged


def _history_uses(version: Version) -> list[DataUse]:
    """Return what ancestors that are in another repository used, run by run."""
    runs: dict[str, list[Consumed]] = {}
    for item in version.history:
        try:
            for each in _read_history(item):
                runs.setdefault(each.use.run or "", []).append(each)
        except (ConfigError, CorruptDataError):
            continue  # a gap of the version
    return [
        replace(consumed[-1].use, spans=tuple(each.segment.span for each in consumed))
        for run, consumed in runs.items()
        if run
    ]


def _order_of(use: DataUse) -> ReadOrder | None:
    try:
        return parse_use(use)[0]
    except (ConfigError, CorruptDataError):
        return None


def _joined(consumed: Sequence[Consumed]) -> Iterator[Consumed]:
    """Yield segments with those that one run consumed one after the other as one."""
    last: dict[tuple[Any, ...], Consumed] = {}
    for each in consumed:
        span = each.segment.span
        line = (each.segment.order, span.start, span.step, span.global_batch, span.tail, each.use.run)
        before = last.get(line)
        if before is not None and before.segment.span.stop == each.segment.since:
            last[line] = each._replace(segment=replace(each.segment, since=before.segment.since))
        elif before is None:
            last[line] = each
        else:
            last[*line, len(last)] = each
    yield from last.values()


def _history_dict(consumed: Consumed) -> dict[str, Any]:
    segment, use = consumed.segment, consumed.use
    return {
        "version": consumed.version.removesuffix(_ELSEWHERE),
        "dataset": use.dataset,
        "split": use.split,
        "state": dict(use.state),
        "run": use.run,
        "span": segment.span.to_dict(),
        "since": list(segment.since),
        "stop_step": segment.stop_step,
    }


def _read_history(item: Mapping[str, Any]) -> Iterator[Consumed]:
    if "gap" in item:
        return
    use = DataUse.from_dict(item)
    try:
        since = _cursor(item["since"])
        span = ReadSpan.from_dict(item["span"])
        stop_step = item.get("stop_step")
        segment = Segment(parse_use(use)[0], span, since, stop_step if type(stop_step) is int else None)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"this is no history of a version: {error!r}; found {item!r}") from error
    if not span.start <= since <= span.stop:
        raise CorruptDataError(f"this is no history of a version: {since} is not in {span}")
    yield Consumed(f"{item.get('version')}{_ELSEWHERE}", segment, use)


def _cursor(pair: Sequence[int]) -> Cursor:
    epoch, position = pair
    return cursor_of({"epoch": epoch, "position": position})
