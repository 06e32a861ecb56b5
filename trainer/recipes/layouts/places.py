"""Which parts of the state of an elastic run the ranks have after a change of ranks, and which ranks send them. Pure.

After a change, ranks have other numbers, and with these other parts of a divided model. Each rank may have copies of
the state of its former part. Invariant: all ranks continue from copies of one commit, and each gets its part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from datasvc.planning.layout import Layout, plan_layout

# Axes that divide the model. Ranks that differ only in others have equal parts, after a commit also of two replicas.
_PART_AXES = ("pipeline", "shard", "context", "tensor")

Commit = tuple[int, int, int]
AT_STEP, AFTER_EPOCH, IN_ROUND = range(3)  # a later one is newer


@dataclass(frozen=True)
class Place:
    """What a rank has.

    Attributes:
        replica: replica that makes steps of its own; 0 if all ranks make each step together.
        part: number of the part of the model.
    """

    replica: int = 0
    part: int = 0


@dataclass(frozen=True)
class StateCopy:
    """A copy of the state of a place at a commit, that a rank has in memory.

    Attributes:
        commit: round of the ranks, step, and what the copy has besides: one of `AT_STEP`, `AFTER_EPOCH`, `IN_ROUND`.
            Copies of one commit have equal weights, and parts of one state. `IN_ROUND` only those of one replica do.
        place: the place.
        num_applied: samples that the replica has applied since then, if `IN_ROUND`.
    """

    commit: Commit
    place: Place
    num_applied: int = 0


@dataclass(frozen=True)
class TransferPlan:
    """From which copies the ranks continue.

    Attributes:
        commit: the commit; None: no commit has a copy of each part.
        sources: for each rank, the rank whose copy it takes; its own number if it keeps its own copy.
        keeps_moments: whether the moments of each replica are those of one former replica. Otherwise they begin
            again: ranks of a replica that update the same weights would make different steps.
        missing: parts of which no rank has a copy of the newest commit, if `commit` is None. All parts, if each is
            left in a round, but no whole replica.
        num_applied: for each rank, which copy of the commit it continues or sends, see `StateCopy`; None: none of
            its own. () unless the commit is `IN_ROUND`.
    """

    commit: Commit | None
    sources: tuple[int, ...] = ()
    keeps_moments: bool = True
    missing: tuple[int, ...] = ()
    num_applied: tuple[int | None, ...] = ()

    def takes(self, rank: int, copy: StateCopy) -> bool:
        """Return whether a copy that a rank has is the one that it continues or sends."""
        is_in_round = bool(self.num_applied)
        return copy.commit == self.commit and (not is_in_round or copy.num_applied == self.num_applied[rank])


def find_places(layout: Layout, *, has_own_steps: bool) -> list[Place]:
    """Return the place of each rank; `has_own_steps`: replicas make steps of their own, and average their weights."""
    places = []
    for rank in plan_layout(layout).ranks:
        part = 0
        for axis in _PART_AXES:
            part = part * layout.size_of(axis) + rank.coordinates[axis]
        # Without other axes, each rank is a replica.
        replica = rank.rank if layout.is_data_only else rank.coordinates["replica"]
        places.append(Place(replica if has_own_steps else 0, part))
    return places


def plan_transfers(copies: Sequence[Sequence[StateCopy]], places: Sequence[Place]) -> TransferPlan:
    """Return how the ranks continue from the newest commit of which there is a copy of each part.

    A replica keeps its moments if all of its ranks were in one replica, and have the parts that they had. Otherwise
    it takes the state of the first replica that is whole.

    Args:
        copies: copies that each rank has, by rank.
        places: new place of each rank, see `find_places`.
    """
    parts = {place.part for place in places}
    commits = sorted({copy.commit for of_rank in copies for copy in of_rank}, reverse=True)
    for commit in commits:
        of_commit = [[copy for copy in of_rank if copy.commit == commit] for of_rank in copies]
        if commit[2] == IN_ROUND:
            num_ranks = len(places) // (max(place.replica for place in places) + 1)
            found = _find_whole_replicas(of_commit, num_ranks)
        else:
            found = [of_rank[0] if of_rank else None for of_rank in of_commit]
        held = [None if copy is None else copy.place for copy in found]
        if {place.part for place in held if place is not None} >= parts:
            plan = _plan_from(commit, held, places)
            if commit[2] != IN_ROUND:
                return plan
            return replace(plan, num_applied=tuple(None if copy is None else copy.num_applied for copy in found))
    if not commits:
        return TransferPlan(None)
    left = {copy.place.part for of_rank in copies for copy in of_rank if copy.commit == commits[0]}
    return TransferPlan(None, missing=tuple(sorted(parts - left or parts)))


def _find_whole_replicas(copies: Sequence[Sequence[StateCopy]], num_ranks: int) -> list[StateCopy | None]:
    """Return for each rank the newest of its copies of a round that all ranks of its replica have; None: none.

    A rank has several: that of the start of the rest of a round, and a later one.
    """
    members: dict[int, list[set[int]]] = {}
    for of_rank in copies:
        if of_rank:
            numbers = {copy.num_applied for copy in of_rank}
            members.setdefault(of_rank[0].place.replica, []).append(numbers)
    common = {
        replica: max(set.intersection(*numbers), default=None)
        for replica, numbers in members.items()
        if len(numbers) == num_ranks
    }
    return [
        next((copy for copy in of_rank if copy.num_applied == common.get(copy.place.replica)), None)
        for of_rank in copies
    ]


def _plan_from(commit: Commit, held: Sequence[Place | None], places: Sequence[Place]) -> TransferPlan:
    # The first rank with each part of each former replica.
    holders: dict[int, dict[int, int]] = {}
    for rank, place in enumerate(held):
        if place is not None:
            holders.setdefault(place.replica, {}).setdefault(place.part, rank)
    parts = {place.part for place in places}
    whole = next((replica for replica in sorted(holders) if holders[replica].keys() >= parts), None)
    if whole is None:
        anywhere = {part: rank for of_replica in holders.values() for part, rank in of_replica.items()}
        sources = [
            rank if _has_part(held[rank], place) else anywhere[place.part] for rank, place in enumerate(places)
        ]
        return TransferPlan(commit, tuple(sources), keeps_moments=False)
    stays = _find_staying(held, places)
    sources = []
    for rank, place in enumerate(places):
        keeps = _has_part(held[rank], place) if len(holders) == 1 else stays[place.replica]
        sources.append(rank if keeps else holders[whole][place.part])
    return TransferPlan(commit, tuple(sources))


def _has_part(held: Place | None, place: Place) -> bool:
    return held is not None and held.part == place.part


def _find_staying(held: Sequence[Place | None], places: Sequence[Place]) -> Mapping[int, bool]:
    """Return for each replica whether all of its ranks have their parts of one former replica."""
    former: dict[int, set[int | None]] = {}
    for had, place in zip(held, places, strict=True):
        number = had.replica if had is not None and had.part == place.part else None
        former.setdefault(place.replica, set()).add(number)
    return {replica: len(numbers) == 1 and None not in numbers for replica, numbers in former.items()}
