"""Names of data sets and models, their tags, versions and training runs: what changes with each commit."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

from datasvc.errors import ConfigError, NotFoundError
from datasvc.models.registry.registry import describe_versions
from datasvc.models.search.index import map_models
from datasvc.repository import Kind, Repository, Resolved
from datasvc.repository.logs.branches import branch_of
from datasvc.repository.logs.references import check_name, is_name
from datasvc.repository.resolved import KIND_NAMES, NameState, keep_valid
from datasvc.runs import RunSummary, list_runs
from datasvc.shards.lines.commit import check_splits
from datasvc.ui.registry.records import (
    DatasetRow,
    DatasetVersionsPage,
    ModelRow,
    ModelVersionsPage,
    NamesPage,
    RegisteredName,
    RegisteredTag,
    RunFacts,
    RunsPage,
    TagHistory,
    TagList,
    TagMove,
)
from datasvc.ui.registry.route import MAX_VERSION, cut_page, read_limit
from datasvc.ui.web.page import Parts, Query
from datasvc.ui.web.seen_faults import collect_unreadable
from datasvc.ui.web.site import Site

_MAX_START = 100_000


def list_names(kind: Kind, site: Site, _: Parts, query: Query) -> NamesPage:
    """Return a page of the names of data sets or models."""
    repository = site.repo.repository
    with collect_unreadable() as unreadable:
        # Names of the page alone are read; a folder without a version, of a write that never ended, is left out.
        names, following = cut_page([name for name in repository.storage.list(kind) if is_name(name)], query)
        states = zip(names, map_models(repository, partial(repository.state, kind), names), strict=True)
        items = tuple(_describe_name(name, state) for name, state in states if state.versions)
    return NamesPage(items, following, tuple(unreadable.messages()))


def read_name(kind: Kind, site: Site, parts: Parts, _: Query) -> RegisteredName:
    """Return one data set or model."""
    return _describe_name(parts["name"], _read_state(site.repo.repository, kind, parts))


def list_tags(kind: Kind, site: Site, parts: Parts, _: Query) -> TagList:
    """Return the tags of a data set or model."""
    with collect_unreadable() as unreadable:
        tags = _read_state(site.repo.repository, kind, parts).tags
    items = tuple(_describe_tag(tag, Resolved(kind, parts["name"], version)) for tag, version in tags.items())
    return TagList(items, tuple(unreadable.messages()))


def read_tag(kind: Kind, site: Site, parts: Parts, _: Query) -> RegisteredTag:
    """Return the version that a tag points at. Raise NotFoundError if there is no such tag."""
    tag = parts["tag"]
    if tag.isdecimal():
        raise ConfigError(f"{tag[:80]!r} is not a tag; the version with this number is at /versions/{tag[:80]}")
    name = check_name(parts["name"], KIND_NAMES[kind])
    if kind == "datasets" and tag.partition("~")[0] in site.repo.repository.branches(name):
        raise NotFoundError(f"{tag!r} is a branch, not a tag; /{kind}/{name} has the head of each branch")
    return _describe_tag(tag, site.repo.repository.resolve(kind, f"{name}@{tag}"))


def read_tag_history(kind: Kind, site: Site, parts: Parts, _: Query) -> TagHistory:
    """Return all moves of a tag. Raise NotFoundError if it never existed."""
    moves = site.repo.repository.tag_history(kind, parts["name"], parts["tag"])
    if not moves:
        raise NotFoundError(
            f"{parts['name']} never had a tag {parts['tag']!r}; /{kind}/{parts['name']}/tags lists them"
        )
    return TagHistory(tuple(TagMove(move.content["version"], move.content.get("created")) for move in moves))


def list_model_versions(site: Site, parts: Parts, query: Query) -> ModelVersionsPage:
    """Return a page of the versions of a model, newest first."""
    repository, name = site.repo.repository, parts["name"]
    with collect_unreadable() as unreadable:
        numbers, following = _page_of_numbers(_read_state(repository, "models", parts), query)
        found = describe_versions(repository, [Resolved("models", name, number) for number in numbers])
    rows = (
        ModelRow(
            version=version.version,
            ref=str(version),
            created=version.entry["created"],
            message=version.entry["message"],
            step=version.entry["step"],
            metrics=version.entry["metrics"],
            tags=version.tags,
            removed=version.removed,
        )
        for version in found
    )
    return ModelVersionsPage(tuple(rows), following, tuple(unreadable.messages()))


def list_dataset_versions(site: Site, parts: Parts, query: Query) -> DatasetVersionsPage:
    """Return a page of the versions of a data set, newest first."""
    repository, name = site.repo.repository, parts["name"]
    with collect_unreadable() as unreadable:
        state = _read_state(repository, "datasets", parts)
        numbers, following = _page_of_numbers(state, query)
        entries = keep_valid("datasets", name, repository.readable_entries("datasets", name, numbers), check_splits)
    rows = (
        DatasetRow(
            version=entry.number,
            ref=f"{name}@{entry.number}",
            created=entry.content.get("created"),
            message=str(entry.content.get("message", "")),
            samples=sum(split["samples"] for split in entry.content["splits"].values()),
            bytes=sum(split["bytes"] for split in entry.content["splits"].values()),
            tags=tuple(tag for tag, number in state.tags.items() if number == entry.number),
            removed=entry.number in state.removed,
            branch=branch_of(entry.content),
        )
        for entry in entries
    )
    return DatasetVersionsPage(tuple(rows), following, tuple(unreadable.messages()))


def _read_state(repository: Repository, kind: Kind, parts: Parts) -> NameState:
    """Return the state of a name. Raise ConfigError if it is not a name, NotFoundError if it does not exist."""
    return repository.known_state(kind, check_name(parts["name"], KIND_NAMES[kind]))


def _describe_name(name: str, state: NameState) -> RegisteredName:
    removed = tuple(sorted(state.removed))
    return RegisteredName(name, state.newest, len(state.versions), removed, state.tags, state.branches)


def _describe_tag(tag: str, version: Resolved) -> RegisteredTag:
    return RegisteredTag(version.name, tag, version.version, str(version))


def _page_of_numbers(state: NameState, query: Query) -> tuple[list[int], int | None]:
    """Return the versions of a page, newest first, and the value of `after` for the next one."""
    # The number of the last version, not its position: a version that is committed meanwhile moves no page.
    after = query.number("after", MAX_VERSION + 1)
    older = [number for number in reversed(state.versions) if number < after]
    limit = read_limit(query)
    return older[:limit], older[limit - 1] if len(older) > limit else None


def list_run_facts(site: Site, _: Parts, query: Query) -> RunsPage:
    """Return a page of the runs, newest first, or of those with `name`."""
    last = query.number("after", 0, high=_MAX_START) + read_limit(query) + 1
    runs, following = cut_page(list_runs(site.repo.repository, query.text("name"), last=last), query)
    return RunsPage(tuple(map(_describe, runs)), following)


def read_run_facts(site: Site, parts: Parts, _: Query) -> RunFacts:
    """Return one run."""
    return _describe(site.runs.read(site.repo.repository, parts["name"], parts["id"]).summary)


def _describe(run: RunSummary) -> RunFacts:
    return RunFacts(**{field.name: getattr(run, field.name) for field in fields(RunFacts)})
