"""Recipes of objects that the repository does not store, because they are built from files that stay in place.

`datasvc attach` stores for each shard a recipe, `in_place/ab/DIGEST/RECIPE.json`: which part of which file it is
built from. RECIPE is the digest of the recipe's bytes, so an equal recipe is stored once. An object may have several
recipes, such as of two copies of a file. The bytes that a recipe gives are verified against the digest of the object,
so it cannot give wrong ones.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Final, cast

from blake3 import blake3

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.repository.store.retries import map_exceptions
from datasvc.repository.store.storage import Storage

IN_PLACE: Final = "in_place"
_MAX_RECIPE_BYTES: Final = 16 << 20

Recipe = Mapping[str, Any]
Build = Callable[[Any, Any, Sequence[Recipe], BinaryIO | None], None]
"""Writes an object of the given `Objects`, with a digest, by one of its recipes; raises an error for wrong bytes."""

_build: list[Build] = []


def set_builder(build: Build) -> None:
    """Set the function that builds objects: recipes name files of data sets, which this package does not read."""
    _build[:] = [build]


def store_recipe(storage: Storage, digest: str, recipe: Recipe) -> None:
    """Store a recipe of an object. Raises ConfigError (see `Storage.check_writable`) or UnavailableError."""
    storage.check_writable()
    content = json.dumps(recipe, sort_keys=True).encode()
    storage.put_bytes(f"{_folder(digest)}/{blake3(content).hexdigest()}.json", content)


def read_recipes(storage: Storage, digest: str) -> list[Recipe]:
    """Return the recipes of an object; [] if it has none.

    Raises:
        CorruptDataError: a recipe is damaged, and there is no other.
        UnavailableError: the store does not respond.
    """
    folder, damaged = _folder(digest), None
    recipes: list[Recipe] = []
    for name in storage.list(folder):
        with suppress(NotFoundError):  # deleted since by gc
            content = storage.read(f"{folder}/{name}", _MAX_RECIPE_BYTES)
            if f"{blake3(content).hexdigest()}.json" == name:
                recipes.append(cast("Recipe", json.loads(content)))
            else:
                damaged = CorruptDataError(
                    f"{storage.location(f'{folder}/{name}')} is corrupt: attach the files again, or restore it"
                )
    if damaged is not None and not recipes:
        raise damaged
    return recipes


def delete_recipes(storage: Storage, digest: str) -> None:
    """Delete the recipes of an object, so that it is never built again. Raises UnavailableError."""
    if storage.list(_folder(digest)):
        storage.delete_folder(_folder(digest))


def build_object(objects: Any, digest: str, file: BinaryIO | None) -> bool:
    """Write an object that files in place have to `file`, and verify it; False, and nothing, if it has no recipe.

    Without `file`, check only that the file of a recipe exists and has its size.

    Raises:
        NotFoundError: its file does not exist any more.
        SourceChangedError: its file has changed; the caller must discard what was written.
        CorruptDataError, UnavailableError: a recipe is damaged; the store of the file does not respond.
    """
    recipes = read_recipes(objects.storage, digest)
    if recipes:
        _build[0](objects, digest, recipes, file)
    return bool(recipes)


@contextmanager
def built_file(objects: Any, digest: str) -> Iterator[str | None]:
    """Yield the path of a temporary file with an attached object; None: it has no recipe.

    A mapping that is made in the block keeps the bytes when the file is gone. Raises the errors of `build_object`,
    and UnavailableError: the folder of temporary files is full.
    """
    # The file has no name, so that a killed process leaves nothing.
    with tempfile.TemporaryFile() as file:
        with map_exceptions("write an attached shard to", tempfile.gettempdir()):
            is_built = build_object(objects, digest, cast("BinaryIO", file))
            file.flush()
        yield f"/proc/self/fd/{file.fileno()}" if is_built else None


def recipe_of(path: str) -> str | None:
    """Return the digest of the object that a file of the repository is a recipe of; None for other files."""
    parts = path.split("/")
    return parts[2] if parts[0] == IN_PLACE and len(parts) == 4 and parts[3].endswith(".json") else None


def _folder(digest: str) -> str:
    return f"{IN_PLACE}/{digest[:2]}/{digest}"
