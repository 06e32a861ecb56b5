"""`datasvc models keygen | sign`: create signing keys, and sign model versions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from datasvc.cli.models.arguments import RefArgument
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_line


def keygen(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="New file for the private key.")],
    as_json: JsonOption = False,
) -> None:
    """Create a signing key: FILE is the private key, FILE.pub the public key that verifies signatures.

    Example: datasvc models keygen ~/.datasvc/signing.pem
    """
    from datasvc.models.versions.signing_keys import make_key

    key = make_key(path.expanduser())
    if as_json:
        print_json({"key": key.id, "private": str(path), "public": str(key.source)})
    else:
        print_line(f"created key {key.id}: {path} is the private key, {key.source} the public key for verification")


def sign(
    ref: RefArgument,
    key: Annotated[Path, typer.Option(help="File of a private key, see `datasvc models keygen`.")],
    repo: RepoOption,
    as_json: JsonOption = False,
) -> None:
    """Sign a model version: its name, its number and its digests, and thereby all of its bytes.

    Example: datasvc models sign digits-cnn@3 --key ~/.datasvc/signing.pem --repo s3://bucket/repo
    """
    from datasvc.models.versions.signing import sign as run_sign
    from datasvc.models.versions.signing_keys import load_private_key
    from datasvc.repository import Repository

    signature = run_sign(Repository.open(repo), ref, load_private_key(key.expanduser()))
    if as_json:
        print_json(asdict(signature))
    else:
        print_line(f"signed {signature.version} with key {signature.key_id}: {signature.location}")
