"""`datasvc audit`: prove from a run's ledger that no sample of an epoch was lost or served twice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from datasvc.cli.terminal.output import JsonOption, print_json, print_line
from datasvc.errors import CorruptDataError
from datasvc.printable import count_text

if TYPE_CHECKING:
    from datasvc.ledger.audit import Audit
    from datasvc.ledger.audit_text import SampleNames
    from datasvc.ledger.strided_range import Uneven

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
    """Prove from a run's ledger that no sample of an epoch was lost or served twice, or list those that were.

    Example: datasvc audit /shared/run7/ledger --epoch 0 --repo ./repo

    A sample that is served again after a restart from an older state counts once, because the weights from before the
    restart are discarded. Exit status: 0 if an epoch is finished and no error was found, 1 if not, 3 if the ledger is
    damaged.
    """
    from datasvc.ledger.audit import audit_folders
    from datasvc.ledger.audit_text import audit_facts, open_names
    from datasvc.repository import Repository

    result = audit_folders(ledgers, epoch=epoch)
    names = None if repo is None else open_names(result, lambda: Repository.open(repo))
    if as_json:
        print_json(audit_facts(result, show, names))
    else:
        _print_audit(result, show, names)
    if result.damage:
        raise typer.Exit(CorruptDataError.exit_code)
    raise typer.Exit(0 if result.is_proven else 1)


def _print_audit(result: Audit, show: int, names: SampleNames | None) -> None:
    from datasvc.ledger.audit_text import describe_conclusion, describe_counts

    sizes = " -> ".join(map(str, result.world_sizes))
    print_line(f"{result.header.source}: {count_text(result.num_files, 'file')}, ranks {sizes}")
    for line in (*result.damage, *result.disagreements):
        print_line(line)
    for path in result.torn:
        print_line(f"{path}: its end was cut off by a crash; complete records count")
    for epoch in result.epochs:
        print_line(f"epoch {epoch.epoch}: {describe_conclusion(epoch)}")
        for line in (*describe_counts(epoch), *epoch.reasons):
            print_line(f"  {line}")
        for title, uneven in (("never served", epoch.never), ("served more than once", epoch.repeated)):
            if uneven.count:
                print_line(f"  {title}: {_samples_line(uneven, epoch.epoch, show, names)}")


def _samples_line(uneven: Uneven, epoch: int, show: int, names: SampleNames | None) -> str:
    from datasvc.ledger.audit_text import list_samples

    texts = [
        f"{sample['key']} (position {sample['position']})" if "key" in sample else f"position {sample['position']}"
        for sample in list_samples(uneven, epoch, show, names)
    ]
    more = uneven.count - len(texts)
    return ", ".join(texts + ([f"and {more} more"] if more else []))
