"""`datasvc models`: commands for model versions, one module per group.

The commands import the library when they run, so that `--help` does not wait for torch.
"""

from __future__ import annotations

import typer

from datasvc.cli.models import (
    compare,
    diff,
    find,
    interop,
    lineage,
    listing,
    remove,
    restore,
    trained_on,
    transfer,
    verify,
)

app = typer.Typer(no_args_is_help=True, help="Model versions: checkpoints with their lineage.")
app.command()(listing.ls)
app.command()(listing.log)
app.command()(listing.show)
app.command()(diff.diff)
app.command()(compare.compare)
app.command()(remove.tag)
app.command()(find.find)
app.command()(find.sql)
app.command()(remove.rm)
app.command()(remove.retain)
app.command()(remove.gc)
app.command()(remove.mark_lost)
app.command()(restore.restore)
app.command()(verify.verify)
app.command()(restore.attach)
app.command()(restore.detach)
app.command()(restore.fetch)
app.command()(verify.keygen)
app.command()(verify.sign)
app.command()(trained_on.trained_on)
app.command()(trained_on.evaluated)
app.command()(lineage.lineage)
app.command("import")(interop.import_model)
app.command("export")(interop.export_model)
app.command()(transfer.push)
app.command()(transfer.pull)
