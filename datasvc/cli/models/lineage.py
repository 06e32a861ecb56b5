"""`datasvc models lineage`: where a version came from, down to shards and sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.models.arguments import RefArgument
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json
from datasvc.cli.terminal.values import text_value

if TYPE_CHECKING:
    from datasvc.models.provenance.lineage import DataOrigin, Lineage, ModelOrigin

_STEP = "  "


def lineage(
    ref: RefArgument,
    repo: RepoOption,
    shards: Annotated[bool, typer.Option("--shards", help="List the shards that were read, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show where a model version came from: versions it continues, code, environment, data, shards and sources.

    Example: datasvc models lineage digits-cnn@3 --repo ./repo
    """
    from datasvc.models import read_lineage
    from datasvc.repository import Repository

    found = read_lineage(Repository.open(repo), ref)
    if as_json:
        print_json(found.to_dict())
        return
    for line in (*_model_lines(found), *_data_lines(found, shards=shards), *found.gaps):
        typer.echo(text_value(line))


def _model_lines(found: Lineage) -> Iterator[str]:
    """Yield the versions, newest first; neighbours that differ in how far they came alone as one."""
    before: dict[str, Any] = {}
    for _, group in groupby(found.models.values(), key=_kind):
        versions = list(group)
        newest, oldest = versions[0], versions[-1]
        name = newest.name if len(versions) == 1 else f"{newest.name} to {oldest.name}, {len(versions)} versions"
        about = [f"step {newest.step}", *([newest.created] if newest.created else []), newest.message]
        yield f"{name}: {', '.join(each for each in about if each)}"
        made = {"code": _code(newest.code), "environment": _environment(newest.environment)}
        for what, said in made.items():
            if said and said != before.get(what):
                yield f"{_STEP}{what}: {said}"
        before = made
        if newest.origin:
            yield f"{_STEP}copied from {newest.origin.get('version')} of {newest.origin.get('repository')}"
        for line in dict.fromkeys(_consumed(each, versions) for each in reversed(newest.consumed)):
            yield f"{_STEP}{line}"
        for data in newest.evaluated:
            yield f"{_STEP}evaluated on {data}"
        for version in versions:
            yield from (f"{_STEP}{version.name}: {gap}" for gap in version.gaps)
        if oldest.parents:
            yield f"{_STEP}continues {', '.join(oldest.parents)}"


def _kind(model: ModelOrigin) -> tuple[Any, ...]:
    """Return what is equal for versions of one run; a version with two parents or another model's stands alone."""
    name = model.name.partition("@")[0]
    is_plain = len(model.parents) == 1 and model.parents[0].partition("@")[0] == name
    data = {(each["data"], each["table"]) for each in model.consumed}
    own = "" if is_plain else model.name
    return name, own, str(model.code), str(model.environment), sorted(data), model.evaluated, model.message


def _consumed(each: Mapping[str, Any], versions: Sequence[ModelOrigin]) -> str:
    """Say what was read of one split by all of some versions of a run."""
    read = [
        other
        for version in versions
        for other in version.consumed
        if (other["data"], other["table"]) == (each["data"], each["table"])
    ]
    (epoch, position), (last, stop) = min(other["start"] for other in read), max(other["stop"] for other in read)
    sizes = sorted({other["global_batch"] for other in read if other["global_batch"] is not None})
    batches = f", batches of {', '.join(map(str, sizes))}" if sizes else ""
    tail = f", tail {each['tail']}" if each["tail"] is not None else ""
    return f"read {each['data']} from epoch {epoch}, position {position} to {last}, {stop}{batches}{tail}"


def _data_lines(found: Lineage, *, shards: bool) -> Iterator[str]:
    """Yield the data-set versions that were read, each with what it was made from below it."""
    tables = {table: data for model in found.models.values() for table, data in _tables(model)}
    told: set[str] = set()
    for version in dict.fromkeys(data.rpartition("/")[0] for data in tables.values()):
        if version in found.datasets:
            yield from _dataset_lines(found, version, told)
    for table, data in tables.items():
        own = found.shards[table]
        yield f"{data}: shard table {table}, {len(own)} shards"
        yield from (f"{_STEP}{shard}" for shard in own if shards)


def _tables(model: ModelOrigin) -> Iterator[tuple[Any, str]]:
    return ((each["table"], str(each["data"])) for each in model.consumed)


def _dataset_lines(found: Lineage, root: str, told: set[str]) -> Iterator[str]:
    line = [(root, 0)]
    while line:
        name, depth = line.pop()
        origin = found.datasets.get(name)
        if origin is None:
            yield f"{_STEP * depth}{name}: not known here"
        elif name in told:
            yield f"{_STEP * depth}{name}: see above"
        else:
            told.add(name)
            yield f"{_STEP * depth}{name}: {_origin(origin)}"
            # A chain of versions of one data set is no deeper than its newest.
            line += [
                (parent, depth + (len(origin.parents) > 1 or _other(parent, name)))
                for parent in reversed(origin.parents)
            ]


def _other(parent: str, name: str) -> bool:
    return parent.partition("@")[0] != name.partition("@")[0]


def _origin(origin: DataOrigin) -> str:
    splits = ", ".join(f"{split} {facts.get('samples')}" for split, facts in origin.splits.items())
    source, change = origin.source, origin.change
    kind = change.get("kind", "ingested")
    if kind == "delete":
        where = f" where {change['where']}" if "where" in change else ""
        made = f"{change.get('deleted')} samples deleted{where}"
    elif kind == "merge":
        made = f"merged of {', '.join(map(str, change.get('versions', ())))}"
    else:
        options = ", ".join(f"{name}={value}" for name, value in source.get("options", {}).items() if value)
        given = f" ({options})" if options else ""
        made = f"{'appended' if kind == 'append' else kind} from {source.get('kind')} {source.get('url')}{given}"
    return f"{made}; {splits}" + (f"; {origin.message}" if origin.message else "")


def _code(code: Mapping[str, Any]) -> str:
    from datasvc.models import CodeRevision

    if not code:
        return ""
    remote = f" of {code['remote']}" if code.get("remote") else ""
    return f"{CodeRevision.from_dict(code)}{remote}"


def _environment(environment: Mapping[str, Any]) -> str:
    packages = environment.get("packages", {})
    named = [f"{name} {packages[name]}" for name in ("datasvc", "torch") if name in packages]
    gpus = [f"{count} x {model}" for model, count in environment.get("gpus", {}).items()]
    facts = [
        f"Python {environment['python']}" if "python" in environment else "",
        *named,
        f"CUDA {environment['cuda']}" if "cuda" in environment else "",
        *gpus,
        f"{environment['world_size']} ranks" if "world_size" in environment else "",
    ]
    return ", ".join(each for each in facts if each)
