"""`datasvc stage --node`: ask the server of a node to stage data sets into the cache of that node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from datasvc.cli.terminal.output import print_json, print_line
from datasvc.progress import byte_progress
from datasvc.sizes import format_size


def stage_on_node(
    node: str,
    refs: Sequence[str],
    repo: str | None,
    split: str | None,
    *,
    token_file: Path | None,
    ca: Path | None,
    tls_name: str | None,
    as_json: bool,
) -> None:
    """Stage data sets on a node one after the other. Print a line for each, or all results as one JSON list.

    For errors, see `NodeClient.stage`.
    """
    from datasvc.node.client import NodeClient
    from datasvc.node.http.auth import TOKEN_VARIABLE, load_token

    token = load_token(token_file, os.environ.get(TOKEN_VARIABLE))
    client = NodeClient(node, token=token, ca_file=ca, tls_name=tls_name)
    jobs = []
    for ref in refs:
        with byte_progress(f"staging {ref} on {node}") as progress:
            job = client.stage(ref, repo=repo, split=split, progress=progress)
        jobs.append(job)
        if not as_json:
            sizes = {source: format_size(size_bytes) for source, size_bytes in job["bytes"].items()}
            print_line(
                f"staged {job['ref']} on {node}: {sizes['origin']} from the origin, {sizes['peer']} from peers, "
                f"{sizes['resident']} already in the cache"
            )
    if as_json:
        print_json(jobs)
