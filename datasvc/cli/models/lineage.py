"""`datasvc models lineage`: show the origin of a model version, down to shards and sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.models.arguments import RefArgument
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_line
from datasvc.printable import count_text

if TYPE_CHECKING:
    from datasvc.models.provenance.lineage import DataOrigin, Lineage, ModelOrigin

_INDENT = "  "


def lineage(
    ref: RefArgument,
    repo: RepoOption,
    shards: Annotated[bool, typer.Option("--shards", help="Also list the shards that were read.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the lineage of a model version: parent versions, code, environment, data, shards and sources.

    Example: datasvc models lineage digits-cnn@3 --repo ./repo
    """
    from datasvc.models import read_lineage
    from datasvc.repository import Repository

    tree = read_lineage(Repository.open(repo), ref)
    if as_json:
        print_json(tree.to_dict())
        return
    for line in (*_model_lines(tree), *_data_lines(tree, shards=shards), *tree.gaps):
        print_line(line)


def _model_lines(tree: Lineage) -> Iterator[str]:
    """Yield the lines about the model versions, newest first; consecutive versions of a run are one group."""
    printed: dict[str, Any] = {}
    for _, group in groupby(tree.models.values(), key=_run_key):
        versions = list(group)
        newest, oldest = versions[0], versions[-1]
        name = newest.name if len(versions) == 1 else f"{newest.name} to {oldest.name}, {len(versions)} versions"
        facts = [f"step {newest.step}", *([newest.created] if newest.created else []), newest.message]
        yield f"{name}: {', '.join(fact for fact in facts if fact)}"
        # Code and environment are printed only if they differ from those of the previous group.
        settings = {"code": _code(newest.code), "environment": _environment(newest.environment)}
        for title, text in settings.items():
            if text and text != printed.get(title):
                yield f"{_INDENT}{title}: {text}"
        printed = settings
        if newest.origin:
            yield f"{_INDENT}copied from {newest.origin.get('version')} of {newest.origin.get('repository')}"
        for line in dict.fromkeys(_consumed(use, versions) for use in reversed(newest.consumed)):
            yield f"{_INDENT}{line}"
        for data in newest.evaluated:
            yield f"{_INDENT}evaluated on {data}"
        for version in versions:
            yield from (f"{_INDENT}{version.name}: {gap}" for gap in version.gaps)
        if oldest.parents:
            yield f"{_INDENT}continues {', '.join(oldest.parents)}"


def _run_key(model: ModelOrigin) -> tuple[Any, ...]:
    """Return a key that is equal for versions that are printed as one group."""
    # A version with no parent, several parents, or a parent of another model gets a group of its own.
    name = model.name.partition("@")[0]
    has_plain_parent = len(model.parents) == 1 and model.parents[0].partition("@")[0] == name
    data = {(use["data"], use["table"]) for use in model.consumed}
    unique_name = "" if has_plain_parent else model.name
    return name, unique_name, str(model.code), str(model.environment), sorted(data), model.evaluated, model.message


def _consumed(use: Mapping[str, Any], versions: Sequence[ModelOrigin]) -> str:
    """Return the range of one split that consecutive versions of a run consumed, as text."""
    # All uses of the same split in these versions: the text gives their first start and their last stop.
    uses = [
        other
        for version in versions
        for other in version.consumed
        if (other["data"], other["table"]) == (use["data"], use["table"])
    ]
    (first_epoch, start), (last_epoch, stop) = (
        min(other["start"] for other in uses),
        max(other["stop"] for other in uses),
    )
    sizes = sorted({other["global_batch"] for other in uses if other["global_batch"] is not None})
    batches = f", batches of {', '.join(map(str, sizes))}" if sizes else ""
    tail = f", tail {use['tail']}" if use["tail"] is not None else ""
    return (
        f"read {use['data']} from epoch {first_epoch}, position {start} to epoch {last_epoch}, position {stop}"
        f"{batches}{tail}"
    )


def _data_lines(tree: Lineage, *, shards: bool) -> Iterator[str]:
    """Yield the lines about the data: the versions that were read, with ancestors and sources; then shard tables."""
    tables = {use["table"]: str(use["data"]) for model in tree.models.values() for use in model.consumed}
    printed: set[str] = set()
    for version in dict.fromkeys(data.rpartition("/")[0] for data in tables.values()):
        if version in tree.datasets:
            yield from _dataset_lines(tree, version, printed)
    for table, data in tables.items():
        table_shards = tree.shards[table]
        yield f"{data}: shard table {table}, {count_text(len(table_shards), 'shard')}"
        yield from (f"{_INDENT}{shard}" for shard in table_shards if shards)


def _dataset_lines(tree: Lineage, root: str, printed: set[str]) -> Iterator[str]:
    """Yield a line for the data-set version `root` and for each ancestor; add their names to `printed`."""
    stack = [(root, 0)]
    while stack:
        name, depth = stack.pop()
        origin = tree.datasets.get(name)
        if origin is None:
            yield f"{_INDENT * depth}{name}: not in this repository"
        elif name in printed:
            yield f"{_INDENT * depth}{name}: see above"
        else:
            printed.add(name)
            yield f"{_INDENT * depth}{name}: {_origin(origin)}"
            dataset = name.partition("@")[0]
            for parent in reversed(origin.parents):
                # Successive versions of one data set have the same indentation, so that a long history is readable.
                is_indented = len(origin.parents) > 1 or parent.partition("@")[0] != dataset
                stack.append((parent, depth + is_indented))


def _origin(origin: DataOrigin) -> str:
    splits = ", ".join(f"{split} {facts.get('samples')}" for split, facts in origin.splits.items())
    source, change = origin.source, origin.change
    kind = change.get("kind", "ingested")
    if kind == "delete":
        where = f" where {change['where']}" if "where" in change else ""
        text = f"{count_text(change.get('deleted', 0), 'sample')} deleted{where}"
    elif kind == "merge":
        text = f"merged from {', '.join(map(str, change.get('versions', ())))}"
    else:
        options = ", ".join(f"{name}={value}" for name, value in source.get("options", {}).items() if value)
        suffix = f" ({options})" if options else ""
        text = f"{'appended' if kind == 'append' else kind} from {source.get('kind')} {source.get('url')}{suffix}"
    return f"{text}; {splits}" + (f"; {origin.message}" if origin.message else "")


def _code(code: Mapping[str, Any]) -> str:
    from datasvc.models import CodeRevision

    if not code:
        return ""
    remote = f" of {code['remote']}" if code.get("remote") else ""
    return f"{CodeRevision.from_dict(code)}{remote}"


def _environment(environment: Mapping[str, Any]) -> str:
    packages = environment.get("packages", {})
    package_versions = [f"{name} {packages[name]}" for name in ("datasvc", "torch") if name in packages]
    gpus = [f"{count} x {model}" for model, count in environment.get("gpus", {}).items()]
    facts = [
        f"Python {environment['python']}" if "python" in environment else "",
        *package_versions,
        f"CUDA {environment['cuda']}" if "cuda" in environment else "",
        *gpus,
        count_text(environment["world_size"], "rank") if "world_size" in environment else "",
    ]
    return ", ".join(fact for fact in facts if fact)
