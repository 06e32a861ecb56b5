"""`datasvc models`: model versions; one file per group of commands."""

from __future__ import annotations

import typer

from datasvc.cli.models import (
    comparing,
    finding,
    foreign,
    lineage,
    listing,
    removing,
    restoring,
    saw,
    sign,
    tags,
    transfer,
    verify,
)

app = typer.Typer(no_args_is_help=True, help="Model versions: checkpoints that know what they came from.")
app.command()(listing.ls)
app.command()(listing.log)
app.command()(listing.show)
app.command()(comparing.diff)
app.command()(tags.tag)
app.command()(finding.find)
app.command()(removing.rm)
app.command()(removing.retain)
app.command()(removing.gc)
app.command()(restoring.restore)
app.command()(verify.verify)
app.command()(sign.keygen)
app.command()(sign.sign)
app.command()(saw.saw)
app.command()(lineage.lineage)
app.command("import")(foreign.import_model)
app.command("export")(foreign.export_model)
app.command()(transfer.push)
app.command()(transfer.pull)
