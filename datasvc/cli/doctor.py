"""`datasvc doctor`: what is installed, and whether this machine, folders, stores and nodes are as needed."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from datasvc.cli.nodes.options import CaOption, TlsNameOption, TokenOption, open_nodes
from datasvc.cli.terminal.output import JsonOption, print_json, print_line

_LEVELS: Final = ("problem", "warning", "ok")


def doctor(
    repo: Annotated[
        str | None, typer.Option("--repo", envvar="DATASVC_REPO", help="Repository to check: a folder or a URL.")
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option("--node", help="URL of a node's server to check; may be given several times.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", envvar="DATASVC_CACHE", help="Folder of a cache to check.")
    ] = None,
    token_file: TokenOption = None,
    ca: CaOption = None,
    tls_name: TlsNameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the installation, this machine, and the repository, cache and nodes that are named.

    Example: datasvc doctor --repo s3://bucket/repo --cache /nvme/cache --node http://node1:8765

    Problems come first, then warnings; what to do follows each. The exit status is 1 if there is a problem.
    """
    from datasvc.doctor import examine

    nodes = open_nodes(node or (), token_file, ca, tls_name)
    if sys.stderr.isatty():
        print_line("checking; a store or node that does not respond takes a while", err=True)
    findings = list(examine(repository=repo, nodes=nodes, cache=cache))
    if not as_json:
        for finding in sorted(findings, key=lambda finding: _LEVELS.index(finding.level)):
            print_line(f"{finding.level:8} {finding.check}: {finding.text}")
            if finding.advice:
                print_line(f"         -> {finding.advice}")
    num_problems = sum(finding.level == "problem" for finding in findings)
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings], "problems": num_problems})
    if num_problems:
        raise typer.Exit(1)
