"""`datasvc audit`: prove from a run's ledger that each sample of an epoch was served exactly once."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.terminal.output import JsonOption, print_json, print_line
from datasvc.errors import CorruptDataError
from datasvc.printable import count_text

if TYPE_CHECKING:
    from datasvc.ledger.audit import Audit, EpochAudit
    from datasvc.ledger.coverage import Uneven
    from datasvc.ledger.names import SampleNames

LedgersArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="LEDGER...", help="Folder that the loaders got as ledger=; several, if each node has its own."
    ),
]
KeysRepoOption = Annotated[
    str | None,
    typer.Option("--repo", envvar="DATASVC_REPO", help="Repository of the data set, to list samples by key too."),
]


def audit(
    ledgers: LedgersArgument,
    epoch: Annotated[int | None, typer.Option(min=0, help="Check only this epoch, which must be finished.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Number of samples to list of each kind.")] = 10,
    repo: KeysRepoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove from a run's ledger that each sample of an epoch was served once, or list the samples that were not.

    Example: datasvc audit /shared/run7/ledger --epoch 0 --repo ./repo

    A sample that is served again after a restart from an older state counts once, because the weights from before the
    restart are discarded. Exit status: 0 if an epoch is finished and no error was found, 1 if not, 3 if the ledger is
    damaged.
    """
    result = _read_ledgers(ledgers, epoch)
    if as_json:
        print_json(_json_fields(result, show, repo))
    else:
        _print_audit(result, show, repo)
    if result.damage:
        raise typer.Exit(CorruptDataError.exit_code)
    raise typer.Exit(0 if result.is_proven else 1)


def _read_ledgers(ledgers: list[Path], epoch: int | None) -> Audit:
    from datasvc.ledger.audit import audit as run_audit
    from datasvc.ledger.file import LedgerFile, read_ledger

    results = [list(read_ledger(path)) for path in ledgers]
    damage = [str(file) for folder in results for file in folder if isinstance(file, CorruptDataError)]
    folders = [[file for file in folder if isinstance(file, LedgerFile)] for folder in results]
    # An audit needs at least one readable file: its header states the data set and the access order.
    if damage and not any(folders):
        raise CorruptDataError("\n".join(damage))
    return run_audit(folders, epoch=epoch, damage=damage)


def _open_names(result: Audit, repo: str | None) -> SampleNames | None:
    """Return a lookup of sample keys; None if no repository is given, or if there is no sample to list."""
    if repo is None or not any(epoch.never.count or epoch.repeated.count for epoch in result.epochs):
        return None
    from datasvc.ledger.names import SampleNames
    from datasvc.repository import Repository

    return SampleNames(Repository.open(repo), result.header)


def _sample_facts(uneven: Uneven, epoch: int, show: int, names: SampleNames | None) -> list[dict[str, Any]]:
    from datasvc.ledger.strided_range import first_positions

    positions = first_positions(uneven.ranges, show)
    keys = [None] * len(positions) if names is None else names.keys(epoch, positions)
    return [
        {"position": position} if key is None else {"position": position, "key": key}
        for position, key in zip(positions, keys, strict=True)
    ]


def _json_fields(result: Audit, show: int, repo: str | None) -> dict[str, Any]:
    names = _open_names(result, repo)
    epochs = []
    for epoch in result.epochs:
        counts = {name: value for name, value in vars(epoch).items() if name not in {"never", "repeated"}}
        samples = {
            name: {"count": uneven.count, "samples": _sample_facts(uneven, epoch.epoch, show, names)}
            for name, uneven in (("never", epoch.never), ("repeated", epoch.repeated))
        }
        epochs.append({**counts, **samples, "is_proven": epoch.is_proven})
    facts = {name: value for name, value in vars(result).items() if name not in {"header", "epochs"}}
    order = {
        name: value for name, value in asdict(result.header).items() if name in {"source", "order", "num_samples"}
    }
    return {**facts, **order, "epochs": epochs, "is_proven": result.is_proven}


def _print_audit(result: Audit, show: int, repo: str | None) -> None:
    names = _open_names(result, repo)
    sizes = " -> ".join(map(str, result.world_sizes))
    print_line(f"{result.header.source}: {count_text(result.num_files, 'file')}, ranks {sizes}")
    for line in (*result.damage, *result.disagreements):
        print_line(line)
    for path in result.torn:
        print_line(f"{path}: its end was cut off by a crash; complete records count")
    for epoch in result.epochs:
        print_line(f"epoch {epoch.epoch}: {_verdict(epoch)}")
        for line in (*_count_lines(epoch), *epoch.reasons):
            print_line(f"  {line}")
        for title, uneven in (("never served", epoch.never), ("served more than once", epoch.repeated)):
            if uneven.count:
                print_line(f"  {title}: {_list_samples(uneven, epoch.epoch, show, names)}")


def _verdict(epoch: EpochAudit) -> str:
    if epoch.is_proven:
        return f"proven: each of {count_text(epoch.num_samples, 'sample')} was served once"
    if epoch.is_faultless:
        return (
            f"not finished: each of the first {epoch.reached} of {count_text(epoch.num_samples, 'sample')} "
            "was served once"
        )
    return f"not proven: {count_text(epoch.never.count, 'sample')} never, {epoch.repeated.count} more than once"


def _count_lines(epoch: EpochAudit) -> list[str]:
    counts = {
        f"served {epoch.served}": True,
        f"masked {epoch.masked} that did not decode": epoch.masked,
        f"dropped {epoch.dropped} that filled no batch": epoch.dropped,
        f"padded with {epoch.padded}": epoch.padded,
    }
    lines = [", ".join(text for text, is_shown in counts.items() if is_shown)]
    if epoch.again:
        lines.append(
            f"{epoch.again} were also served before a restart from an older state; those weights are discarded"
        )
    if epoch.copies:
        lines.append(f"{epoch.copies} more are in other files of the same ranks: model-parallel peers, or retries")
    return lines


def _list_samples(uneven: Uneven, epoch: int, show: int, names: SampleNames | None) -> str:
    texts = [
        f"{sample['key']} (position {sample['position']})" if "key" in sample else f"position {sample['position']}"
        for sample in _sample_facts(uneven, epoch, show, names)
    ]
    more = uneven.count - len(texts)
    return ", ".join(texts + ([f"and {more} more"] if more else []))
