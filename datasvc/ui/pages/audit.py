"""The audit of a ledger, to print: what was checked, what it proves, and what would refute it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from datasvc.errors import ConfigError, DatasvcError, NotFoundError
from datasvc.ledger.audit import Audit, audit_folders, find_ledgers
from datasvc.ledger.audit_text import (
    SampleNames,
    audit_facts,
    describe_conclusion,
    describe_counts,
    describe_outcome,
    open_names,
)
from datasvc.models.versions.entry_fields import tree_leaves
from datasvc.ui.web.links import audit_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site

_SAMPLES_LISTED: Final = 10  # of each kind; the default of `datasvc audit`
_MAX_FILES: Final = 2000  # of a ledger that is read while a page waits; a run has a file for each rank and start


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return the audit of a ledger in the folder of ledgers; `epoch` selects one epoch."""
    name = parts["ledger"]
    path = _find(site, name)
    epoch = query.number("epoch", 0) if query.text("epoch") else None
    result = audit_folders([path], epoch=epoch)
    names, reason = _open_names(site, result)
    facts = audit_facts(result, _SAMPLES_LISTED, names)
    words = ["datasvc", "audit", str(path), "--json"]
    words += [] if epoch is None else ["--epoch", str(epoch)]
    words += ["--repo", site.url] if reason is None else []
    problems = [Problem(text) for text in (*result.damage, *result.disagreements)]
    problems += [
        Problem(f"{torn}: its end was cut off by a crash; complete records count", severity="warning")
        for torn in result.torn
    ]
    return Page(
        template="audit.html",
        title=f"Audit of {name}",
        section="runs",
        crumbs=(Crumb("Runs", "/runs"), Crumb(f"audit of {name}", audit_link(name))),
        panels={"audit": Panel(facts, shlex.join(words), _python(site, path, epoch, has_keys=reason is None))},
        problems=tuple(problems),
        view={
            "name": name,
            "conclusion": _conclusion(result),
            "data": _data_links(result),
            "header": result.header,
            # A printed proof has no address and no tool-tip: it states itself what was audited, when, and with what.
            "audited_at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            "version": version("datasvc"),
            "repository": site.url,
            "folder": str(path),
            "epochs": [_describe_epoch(result, number) for number in range(len(result.epochs))],
            "keys_reason": reason,
            "path": audit_link(name),
            "selected": epoch,
        },
    )


def find_ledger_of(folder: Path | None, config: Mapping[str, Any]) -> str | None:
    """Return the ledger that the configuration of a run names, as in `folder`; None if it is not there.

    Args:
        folder: folder of the ledgers; None if there is none.
        config: configuration of the run. A relative path is that of a ledger if the ledger's path ends with it: the
            folder in which the run was started is not known.
    """
    named = next((value for name, value in tree_leaves(config, "") if name.rpartition(".")[2] == "ledger"), None)
    if folder is None or not isinstance(named, str) or not named or "\0" in named:
        return None
    path, whole = Path(named), folder.resolve()
    for ledger in find_ledgers(folder):
        parts = (whole / ledger).parts
        # A browser removes "." from an address, so the folder itself has no page.
        if ledger != "." and (parts == path.parts if path.is_absolute() else parts[-len(path.parts) :] == path.parts):
            return ledger
    return None


def _find(site: Site, name: str) -> Path:
    folder = site.settings.ledgers
    if folder is None:
        raise NotFoundError(
            "this server has no ledgers: start it with --runs FOLDER, the folder with those of the runs"
        )
    # Only names that the search has found: a name such as "../x" cannot leave the folder.
    known = find_ledgers(folder)
    if name not in known:
        shown = ", ".join(known[:10]) or "none"
        raise NotFoundError(f"there is no ledger {name[:80]!r} in {folder}; there are: {shown}")
    return folder / name


def _open_names(site: Site, result: Audit) -> tuple[SampleNames | None, str | None]:
    """Return a lookup of the keys of samples; or None, and why positions have no keys."""
    try:
        return open_names(result, lambda: site.repo.repository), None
    except (ConfigError, DatasvcError) as error:
        return None, str(error)


def _python(site: Site, path: Path, epoch: int | None, *, has_keys: bool) -> str:
    keys = f"open_names(result, lambda: datasvc.open({site.url!r}).repository)" if has_keys else None
    return "\n".join(
        (
            "from pathlib import Path",
            "from datasvc.ledger.audit_text import audit_facts, open_names",
            "from datasvc.ledger.audit import audit_folders",
            f"result = audit_folders([Path({str(path)!r})], epoch={epoch})",
            f"audit_facts(result, {_SAMPLES_LISTED}, {keys})",
        )
    )


def _conclusion(result: Audit) -> str:
    faulty = [epoch.epoch for epoch in result.epochs if epoch.never.count or epoch.repeated.count]
    if result.is_proven:
        finished = [epoch for epoch in result.epochs if epoch.is_proven]
        which = f"epoch {finished[0].epoch}" if len(finished) == 1 else f"the {len(finished)} finished epochs"
        return (
            f"Proven: no sample of {which} was lost or served twice, over all ranks and restarts: "
            f"{describe_outcome(finished)}."
        )
    if faulty:
        return (
            f"Not proven: {len(faulty)} of {len(result.epochs)} epochs have samples that were lost or served twice."
        )
    if result.damage or result.disagreements:
        return "Not proven: files of the ledger are damaged or contradict each other."
    return "Not finished: no epoch has ended yet. No error was found so far."


def _data_links(result: Audit) -> list[tuple[str, str]]:
    """Return reference and split of each source of the run, such as ("pets@3", "train")."""
    sources = [source.rpartition("/") for source in result.header.source.split(", ")]
    return [(ref, split) for ref, _, split in sources]


def _describe_epoch(result: Audit, number: int) -> dict[str, Any]:
    epoch = result.epochs[number]
    return {
        "epoch": epoch.epoch,
        "conclusion": describe_conclusion(epoch),
        "lines": [*describe_counts(epoch), *epoch.reasons],
        "is_faultless": epoch.is_faultless,
    }


@dataclass(frozen=True)
class CurrentEpoch:
    """The newest epoch of a ledger, as its audit has it.

    Attributes:
        ledger: name of the ledger, of its page.
        epoch: number of the epoch; None if there is none to show.
        share: part of its positions that all ranks have passed.
        text: what the audit has found, or why there is no audit.
        panel: the audit of this epoch as values; None if there is none.
    """

    ledger: str
    epoch: int | None
    share: float
    text: str
    panel: Panel | None


def audit_current_epoch(folder: Path, ledger: str) -> CurrentEpoch:
    """Audit the newest epoch of a ledger. Errors, such as those of a ledger without records, are text.

    Args:
        folder: folder of the ledgers.
        ledger: name of the ledger, its path in this folder.
    """
    path = folder / ledger
    try:
        if sum(1 for _ in path.iterdir()) > _MAX_FILES:
            return CurrentEpoch(ledger, None, 0.0, "the ledger has too many files to be read here", None)
        # The number of the epoch is that of the ledger: a program may count its epochs from another one.
        newest = audit_folders([path]).epochs[-1]
        result = audit_folders([path], epoch=newest.epoch)
    except (DatasvcError, OSError) as error:
        return CurrentEpoch(ledger, None, 0.0, str(error), None)
    command = shlex.join(["datasvc", "audit", str(path), "--epoch", str(newest.epoch), "--json"])
    panel = Panel(audit_facts(result, _SAMPLES_LISTED, None), command)
    share = newest.reached / newest.num_samples if newest.num_samples else 0.0
    return CurrentEpoch(ledger, newest.epoch, share, f"{describe_conclusion(newest)}.", panel)
