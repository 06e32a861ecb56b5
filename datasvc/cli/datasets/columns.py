"""`datasvc columns | label | compact`: correct labels and other columns of a data set."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.datasets.ingest import format_counts
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import (
    DoneOption,
    JsonOption,
    MessageOption,
    RefArgument,
    RepoOption,
    check_one_of,
    print_line,
    print_result,
)
from datasvc.errors import ConfigError
from datasvc.printable import count_text, text_value

if TYPE_CHECKING:
    import pyarrow as pa

    from datasvc.shards.history.columns import ColumnReport

_MAX_KEYS = 10
_RUN = "run:"


class ColumnOperation(StrEnum):
    """What `datasvc columns` does."""

    SET = "set"
    ADD = "add"
    DROP = "drop"
    RENAME = "rename"


@options_from(
    "shards.history.columns.set_column",
    in_order="ref operation column new_name repo source key split missing yes dry_run message as_json",
)
def columns(
    ref: RefArgument,
    operation: Annotated[ColumnOperation, typer.Argument(help="What to do with the column.")],
    column: Annotated[str, typer.Argument(metavar="COLUMN", help="The column, such as label.")],
    repo: RepoOption,
    new_name: Annotated[str | None, typer.Argument(metavar="[NEW]", help="Its new name; for rename.")] = None,
    *,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="CSV, JSON lines, Parquet or Arrow with keys and values; or run:NAME[/ID], the losses that a run "
            "has recorded (--signals loss); for set and add.",
        ),
    ] = None,
    yes: DoneOption = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Commit the next version with other values of a column, a further column, or without one; no shard is written.

    Example: datasvc columns pets set label --from relabel.csv --key key --repo ./repo
    """
    import datasvc
    from datasvc.repository import Repository
    from datasvc.repository.logs.references import parse_reference
    from datasvc.shards.history import columns as operations

    check_one_of(yes=yes, dry_run=options["dry_run"])
    is_by_file = operation in (ColumnOperation.SET, ColumnOperation.ADD)
    if is_by_file != (source is not None) or (operation is ColumnOperation.RENAME) != (new_name is not None):
        raise ConfigError(
            "set and add need --from FILE; rename needs the new name: columns pets rename label label_old"
        )
    repository = Repository.open(repo)
    if source is not None:
        values: str | pa.Table = source
        if source.startswith(_RUN):
            name = parse_reference(ref).name
            values = datasvc.open(repo).runs.signal_table(source.removeprefix(_RUN), name)
        run = operations.set_column if operation is ColumnOperation.SET else operations.add_column
        report = run(repository, ref, column, values, **options)
    else:
        if options["dry_run"] or options["missing"] != "fail":
            raise ConfigError("--dry-run and --missing are for set and add")
        more = {"split": options["split"], "message": options["message"]}
        report = (
            operations.rename_column(repository, ref, column, new_name, **more)
            if new_name is not None
            else operations.drop_column(repository, ref, column, **more)
        )
    _print_report(report, as_json=as_json)


@options_from(
    "shards.history.columns.label",
    in_order="ref repo where to split yes dry_run message as_json",
)
def label(
    ref: RefArgument,
    repo: RepoOption,
    where: Annotated[str, typer.Option(metavar="EXPR", help="SQL condition that selects the samples.")],
    to: Annotated[str, typer.Option(metavar="CLASS", help="Name of the class; a number without class names.")],
    *,
    yes: DoneOption = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Commit the next version in which the samples that satisfy a condition have another class; no shard is written.

    Example: datasvc label pets --where "key = 'cat/7.jpg'" --to dog --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards.history.columns import label as run_label

    check_one_of(yes=yes, dry_run=options["dry_run"])
    _print_report(run_label(Repository.open(repo), ref, where, to, **options), as_json=as_json)


def compact(
    ref: RefArgument,
    repo: RepoOption,
    message: MessageOption = "",
    as_json: JsonOption = False,
) -> None:
    """Commit the next version with the values of changed columns in its shards, which are written again.

    Example: datasvc compact pets --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards.history.columns import compact as run_compact

    _print_report(run_compact(Repository.open(repo), ref, message=message), "wrote", as_json=as_json)


def _print_report(report: ColumnReport, verb: str = "changed", *, as_json: bool) -> None:
    is_committed = bool(report.changed) and not report.dry_run
    facts = {"version": str(report.version), "committed": is_committed, "changed": report.changed}
    if report.missing and not as_json:
        listed = ", ".join(text_value(key) for key in report.missing[:_MAX_KEYS])
        more = ", ..." if len(report.missing) > _MAX_KEYS else ""
        print_line(f"{count_text(len(report.missing), 'missing key')}: {listed}{more}", err=True)
    if not report.changed:
        line = f"nothing to change: {report.version} stays the newest version"
    elif report.dry_run:
        line = f"would change {format_counts(report.changed)} samples of {report.version}; nothing was committed"
    else:
        line = f"committed {report.version}: {verb} {format_counts(report.changed)} samples"
    if report.nulls:
        line += f"; {format_counts(report.nulls)} samples have no value"
    print_result({**facts, "nulls": report.nulls, "missing": report.missing}, line, as_json=as_json)
