"""`datasvc audit`: was each sample of an epoch served once?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.terminal.output import JsonOption, print_json
from datasvc.cli.terminal.values import text_value
from datasvc.errors import CorruptDataError

if TYPE_CHECKING:
    from datasvc.ledger.audit import Audit, EpochAudit
    from datasvc.ledger.coverage import Uneven
    from datasvc.ledger.names import SampleNames

LedgersArgument = Annotated[
    list[Path],
    typer.Argument(metavar="LEDGER...", help="What the loaders got as ledger=: the folder, or one of each node."),
]
KeysOption = Annotated[
    str | None,
    typer.Option("--repo", envvar="DATASVC_REPO", help="Repository, to name samples by key instead of position."),
]


def audit(
    ledgers: LedgersArgument,
    epoch: Annotated[int | None, typer.Option(min=0, help="Look at this one only; it must be finished.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Name this many samples of each kind.")] = 10,
    repo: KeysOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove from a run's ledger that each sample of an epoch was served once, or name those that were not.

    Example: datasvc audit /shared/run7/ledger --epoch 0 --repo ./repo

    What was served again after a restart from an older state counts once: the weights of before are gone. Ends with
    status 0 when it is proven for all finished epochs (one at least), 1 when not, 3 when the ledger is damaged.
    """
    found = _read(ledgers, epoch)
    if as_json:
        print_json(_facts(found, show, repo))
    else:
        _print(found, show, repo)
    if found.damage:
        raise typer.Exit(CorruptDataError.exit_code)
    is_proven = found.is_proven if epoch is None else found.is_proven and found.epochs[0].is_proven
    raise typer.Exit(0 if is_proven else 1)


def _read(ledgers: list[Path], epoch: int | None) -> Audit:
    from datasvc.ledger.audit import audit as run_audit
    from datasvc.ledger.file import LedgerFile, read_ledger

    found = [list(read_ledger(path)) for path in ledgers]
    damage = [str(each) for folder in found for each in folder if isinstance(each, CorruptDataError)]
    folders = [[each for each in folder if isinstance(each, LedgerFile)] for folder in found]
    if damage and not any(folders):
        raise CorruptDataError("\n".join(damage))
    return run_audit(folders, epoch=epoch, damage=damage)


def _names(found: Audit, repo: str | None) -> SampleNames | None:
    """Return what names samples, where there are any to name."""
    if repo is None or not any(each.never.count or each.repeated.count for each in found.epochs):
        return None
    from datasvc.ledger.names import SampleNames
    from datasvc.repository import Repository

    return SampleNames(Repository.open(repo), found.header)


def _samples(uneven: Uneven, epoch: int, show: int, names: SampleNames | None) -> list[dict[str, Any]]:
    from datasvc.ledger.strided_range import first_positions

    positions = first_positions(uneven.combs, show)
    keys = [None] * len(positions) if names is None else names.keys(epoch, positions)
    return [
        {"position": position} if key is None else {"position": position, "key": key}
        for position, key in zip(positions, keys, strict=True)
    ]


def _facts(found: Audit, show: int, repo: str | None) -> dict[str, Any]:
    names = _names(found, repo)
    epochs = []
    for each in found.epochs:
        counts = {name: value for name, value in vars(each).items() if name not in {"never", "repeated"}}
        samples = {
            name: {"count": uneven.count, "samples": _samples(uneven, each.epoch, show, names)}
            for name, uneven in (("never", each.never), ("repeated", each.repeated))
        }
        epochs.append({**counts, **samples, "is_proven": each.is_proven})
    facts = {name: value for name, value in vars(found).items() if name not in {"header", "epochs"}}
    order = {
        name: value for name, value in asdict(found.header).items() if name in {"source", "order", "num_samples"}
    }
    return {**facts, **order, "epochs": epochs, "is_proven": found.is_proven}


def _print(found: Audit, show: int, repo: str | None) -> None:
    names = _names(found, repo)
    sizes = " -> ".join(map(str, found.world_sizes))
    _say(f"{found.header.source}: {found.num_files} files, ranks {sizes}")
    for line in (*found.damage, *found.disagreements):
        _say(line)
    for path in found.torn:
        _say(f"{path}: its end was cut off by a crash; what is whole counts")
    for each in found.epochs:
        _say(f"epoch {each.epoch}: {_verdict(each)}")
        for line in (*_counts(each), *each.reasons):
            _say(f"  {line}")
        for what, uneven in (("never served", each.never), ("served more than once", each.repeated)):
            if uneven.count:
                _say(f"  {what}: {_list(uneven, each.epoch, show, names)}")


def _verdict(epoch: EpochAudit) -> str:
    if epoch.is_proven:
        return f"proven: each of {epoch.num_samples} samples accounted for once"
    if epoch.is_faultless:
        return f"under way: each of the first {epoch.reached} of {epoch.num_samples} samples once so far"
    return f"not proven: {epoch.never.count} samples never, {epoch.repeated.count} more than once"


def _counts(epoch: EpochAudit) -> list[str]:
    said = {
        f"served {epoch.served}": True,
        f"masked {epoch.masked} that did not decode": epoch.masked,
        f"dropped {epoch.dropped} that filled no batch": epoch.dropped,
        f"padded with {epoch.padded}": epoch.padded,
    }
    lines = [", ".join(text for text, is_worth_it in said.items() if is_worth_it)]
    if epoch.again:
        lines.append(f"{epoch.again} were served before a restart from an older state too, which the weights forgot")
    if epoch.copies:
        lines.append(f"{epoch.copies} more are in other files of the same ranks: model-parallel peers, or retries")
    return lines


def _list(uneven: Uneven, epoch: int, show: int, names: SampleNames | None) -> str:
    samples = _samples(uneven, epoch, show, names)
    said = [f"{each['key']} (position {each['position']})" if "key" in each else f"position {each['position']}"
            for each in samples]  # fmt: skip
    more = uneven.count - len(said)
    return ", ".join(said + ([f"and {more} more"] if more else []))


def _say(line: str) -> None:
    typer.echo(text_value(line))
