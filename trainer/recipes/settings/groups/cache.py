"""The group of settings of the node's cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from datasvc.errors import ConfigError
from datasvc.repository.logs.references import check_name
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, SettingGroup, naming


@dataclass(frozen=True, kw_only=True)
class CacheSettings(SettingGroup):
    """Where a run reads data and checkpoints from.

    Attributes:
        cache: folder of the node's cache; None or empty: the repository is read directly.
        cache_budget: budget of the node's cache, such as "50GB"; None: its present budget.
        peers: nodes to read from before the repository, written as for `datasvc stage --peers`; "ranks": the nodes of
            this job, each with a server that the job starts; None: no peers.
        tenant: tenant of the cache whose quota this run is charged to; see `datasvc cache quota`.
    """

    title: ClassVar[str] = "cache of the node"

    cache: Annotated[str | None, Metavar("FOLDER")] = None
    cache_budget: Annotated[str | None, Metavar("SIZE")] = None
    peers: Annotated[str | None, Metavar("{ranks,NODES}")] = None
    tenant: Annotated[str, Metavar("NAME")] = "default"

    def check(self) -> None:
        """Check that the settings of a cache come with its folder, and the forms of tenant and budget."""
        check_name(self.tenant, "tenant")
        if self.tenant != "default" and not self.cache:
            raise ConfigError(
                "tenant is a tenant of a node cache: set its folder with --cache, or give --tenant default"
            )
        if self.peers is not None and not self.cache:
            raise ConfigError("peers need a node cache: set its folder with --cache, or give --peers ''")
        if self.cache_budget is not None:
            if not self.cache:
                raise ConfigError(
                    "cache_budget is the budget of a node cache: set its folder with --cache, or give "
                    "--cache-budget ''"
                )
            # Imported here, because most runs have no budget, and need the cache only after this check.
            from datasvc.cache import parse_budget

            with naming("cache_budget", self.cache_budget):
                parse_budget(self.cache_budget, Path("/"))  # any folder: only the form of the budget is checked
