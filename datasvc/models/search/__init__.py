"""Finding model versions by what they say of themselves."""

from datasvc.models.search.find import find_versions

__all__ = ["find_versions"]
