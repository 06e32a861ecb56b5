"""What the commands of `datasvc models` take alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RefArgument = Annotated[str, typer.Argument(metavar="REF", help="NAME, NAME@VERSION, NAME@TAG or NAME@TAG~1.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of a model.")]
TrustedOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--trusted-keys",
        help="A file of public keys, by one of which versions must be signed; may be given several times. Default: "
        "the files that DATASVC_TRUSTED_KEYS names.",
    ),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="PATTERN",
        help="Only these tensors: 'model.layer4.*', a whole name or a prefix of one; may be given several times.",
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
        help="Other names: of a tensor or a prefix, 'model.backbone=model.body', 'model='; or 're:PATTERN=TEMPLATE'. "
        "May be given several times, applied in this order.",
    ),
]
