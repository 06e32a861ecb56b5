"""Arguments and options shared by the commands of `datasvc models`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from datasvc.cli.terminal.completion import reference

RefArgument = Annotated[str, reference("NAME, NAME@VERSION, NAME@TAG, NAME@TAG~1 or NAME@best:METRIC.")]
NameArgument = Annotated[str, reference("Name of a model.", "NAME")]
TrustedOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--trusted-keys",
        help="File of public keys; versions must be signed by one of them; may be given several times. Default: the "
        "files listed in DATASVC_TRUSTED_KEYS.",
    ),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="PATTERN",
        help="Only these tensors: a name, a prefix of names, or 'model.layer4.*'; may be given several times.",
    ),
]
ExcludeOption = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="PATTERN", help="All tensors but these; may be given several times."),
]
MapOption = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="OLD=NEW",
        help="Rename tensors: 'model.backbone=model.body' replaces a name or prefix, 'model=' removes a prefix, and "
        "'re:PATTERN=TEMPLATE' replaces matches of a regular expression. May be given several times; each rule "
        "applies to the names that the previous ones result in.",
    ),
]
