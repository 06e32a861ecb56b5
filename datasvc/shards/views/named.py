"""Named views of a data set: a log for each name, whose entries keep the objects of the views from `gc`.

An entry names the table of a view, or records that the name was removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.repository import Digest, Entry, Objects, Repository, Resolved
from datasvc.repository.logs.log import Log, list_logs
from datasvc.repository.logs.references import check_tag
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.objects.presence import check_present
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.dataset import Split

# Of each repository, while it is open: many model versions name the same views.
_objects: Final[WeakKeyDictionary[Objects, dict[Digest, frozenset[Digest]]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class NamedView:
    """A named view.

    Attributes:
        name: its name; `pets[NAME]` opens it.
        dataset: the version that it is a view of, such as "pets@3".
        split: name of the split.
        samples: number of its samples.
        steps: how they were chosen.
        table: digest of its table.
        message: text stored with it.
        created: when, in UTC.
    """

    name: str
    dataset: str
    split: str
    samples: int
    steps: tuple[str, ...]
    table: Digest
    message: str
    created: str

    @property
    def is_weighted(self) -> bool:
        """Whether its samples are served by weights."""
        return any(step.startswith(("weighted(", "balanced(")) for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """Return the view as JSON values."""
        return {**asdict(self), "steps": list(self.steps), "weights": self.is_weighted}


def make_view(
    split: Split,
    *,
    where: str | None = None,
    take: float | None = None,
    seed: int = 0,
    weights: str | None = None,
    balance: str | None = None,
    strength: float = 1.0,
) -> Split:
    """Return the view of a split that these options describe, applied in their order; the split itself for none.

    Args:
        split: the split; it may be a view.
        where: condition, see `Split.where`.
        take: take about this fraction of the samples.
        seed: which samples `take` takes.
        weights: column with the weights of the samples.
        balance: column whose values are served more evenly, such as label.
        strength: of `balance`: 0 as it is, 1 equal shares.

    Raises:
        ConfigError: `weights` and `balance` are both given; or see `Split.where`, with its other errors.
    """
    if weights is not None and balance is not None:
        raise ConfigError("weights (--weights) and balance (--balance) exclude each other; give one of them")
    if where is not None:
        split = split.where(where)
    if take is not None:
        split = split.take(take, seed=seed)
    if weights is not None:
        split = split.weighted(weights)
    return split if balance is None else split.balanced(balance, strength)


def save_view(repository: Repository, name: str, view: Split, *, message: str = "") -> NamedView:
    """Store a view under a name of its data set; a view that has this name already is replaced.

    Args:
        repository: the repository that stores the data set.
        name: name of the view; `open("pets[NAME]")` opens it.
        view: the view, such as `split.where("label != 'cat'")`.
        message: text stored with the view.

    Raises:
        ConfigError: the name is not valid; or `view` is no view, or one of another repository.
        NotFoundError: an object of the view was removed by a gc since.
        ConflictError, UnavailableError: see `Log.append`.
    """
    origin = view.table.view
    if origin is None or view.repository.url != repository.url:
        raise ConfigError(
            f"{view!r} is no view of this repository; make one, such as split.where(\"label != 'cat'\")"
        )
    dataset, _, number = view.dataset.partition("@")
    named = NamedView(name, view.dataset, view.name, len(view), origin.steps, view.digest, message, created="")
    return record_view(repository, Resolved("datasets", dataset, int(number)), named)


def record_view(repository: Repository, version: Resolved, view: NamedView) -> NamedView:
    """Store a view, whose objects are in the repository, under its name, as one of `version`; see `save_view`."""
    log = _log(repository, version.name, view.name)
    own = objects_of_view(repository.objects, view.table)
    check_present(repository.objects, own, f"the view {version.name}[{view.name}]")
    content = {
        "version": version.version,
        "split": view.split,
        "table": view.table,
        "samples": view.samples,
        "steps": list(view.steps),
        "message": view.message,
    }
    return _parse(version.name, view.name, log.append(lambda _head: content))


def objects_of_view(objects: Objects, digest: Digest) -> frozenset[Digest]:
    """Return the objects that only a view has: its table, what it leaves out, and weights; none for other tables.

    Raises:
        CorruptDataError, NotFoundError, ConfigError, UnavailableError: see `ShardTable.read`.
    """
    known = _objects.setdefault(objects, {})
    if digest not in known:
        table = ShardTable.read(objects, digest)
        packs = [pack.digest for pack in table.packs]
        own = [digest, *packs, *([table.deletions] if table.deletions else [])]
        known[digest] = frozenset(own if table.view is not None else ())
    return known[digest]


def read_views(repository: Repository, dataset: str) -> dict[str, NamedView]:
    """Return the named views of a data set, by name.

    Raises:
        CorruptDataError, ConfigError, UnavailableError: see `Log.read`.
    """
    found: dict[str, NamedView] = {}
    for name, numbers in sorted(list_logs(repository.storage, _folder(dataset)).items()):
        entry = _log(repository, dataset, name).read(numbers[-1])
        if entry.content.get("table") is not None:
            found[name] = _parse(dataset, name, entry)
    return found


def find_named(repository: Repository, dataset: str, name: str) -> NamedView:
    """Return a named view. Raise NotFoundError, which lists the names, and the errors of `read_views`."""
    views = read_views(repository, dataset)
    if name not in views:
        raise NotFoundError(f"{dataset} has no view {name!r}; it has: {', '.join(views) or 'none yet'}")
    return views[name]


def remove_view(repository: Repository, dataset: str, name: str, *, message: str = "") -> None:
    """Remove the name of a view. `gc` keeps its objects only while a model version names them.

    Raises:
        NotFoundError: there is no such view; the message lists the names.
        ConflictError, CorruptDataError, UnavailableError: see `Log.append`.
    """
    find_named(repository, dataset, name)
    _log(repository, dataset, name).append(lambda _head: {"table": None, "message": message})


def view_tables(repository: Repository, dataset: str) -> set[Digest]:
    """Return the tables of all named views of a data set, of each name also those that it had before.

    Raises:
        CorruptDataError, ConfigError, UnavailableError: see `Log.read`.
    """
    names = list_logs(repository.storage, _folder(dataset))
    return {table for name in names for table in tables_of_name(repository, dataset, name)}


def tables_of_name(repository: Repository, dataset: str, name: str) -> set[Digest]:
    """Return the tables that the name of a view has and had; {} if it was removed. For errors, see `Log.read`."""
    tables: set[Digest] = set()
    for entry in _log(repository, dataset, name).entries():
        # A run that read a replaced view may continue; a removal ends all of them.
        tables = tables | {_parse(dataset, name, entry).table} if entry.content.get("table") is not None else set()
    return tables


def find_stored(split: Split, key: str) -> Split | None:
    """Return the view of a split that is stored under a name of ours; None if there is none any more.

    Raises:
        CorruptDataError, ConfigError, UnavailableError: see `Log.read`.
    """
    for digest in tables_of_name(split.repository, split.dataset.partition("@")[0], key):
        view = Split(split.name, split.dataset, split.repository, digest)
        with suppress(NotFoundError):  # its objects were deleted: the caller makes the view again
            return view if view.table.view is not None else None
    return None


def _parse(dataset: str, name: str, entry: Entry) -> NamedView:
    content: Mapping[str, Any] = entry.content
    try:
        return NamedView(
            name,
            # The version by number: a rename copies the entries.
            f"{dataset}@{int(content['version'])}",
            str(content["split"]),
            int(content["samples"]),
            tuple(map(str, content["steps"])),
            parse_digest(content["table"]),
            str(content["message"]),
            str(content["created"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"entry {entry.number} of the view {name} is not valid: {error!r}") from error


def _log(repository: Repository, dataset: str, name: str) -> Log:
    return Log(repository.storage, f"{_folder(dataset)}/{check_tag(name, 'view')}")


def _folder(dataset: str) -> str:
    return f"datasets/{dataset}/views"
