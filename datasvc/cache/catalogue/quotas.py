"""Who may use how much of a cache: a pure account.

A tenant's guarantee is its own whether it uses it or not, so it is never waited for; what is above may go to anybody
up to a maximum. In short: the sum over tenants of max(used, guaranteed) never exceeds the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from datasvc.errors import ConfigError

DEFAULT_TENANT = "default"


@dataclass(frozen=True)
class Quota:
    """What a tenant may use. Bytes.

    Attributes:
        guaranteed_bytes: its own, used or not.
        maximum_bytes: never more than that; None: as much as there is.

    Raises:
        ConfigError: out of range.
    """

    guaranteed_bytes: int = 0
    maximum_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.guaranteed_bytes < 0:
            raise ConfigError(f"a guarantee of {self.guaranteed_bytes} bytes makes no sense; expected 0 or more")
        if self.maximum_bytes is not None and self.maximum_bytes < max(1, self.guaranteed_bytes):
            raise ConfigError(
                f"a maximum of {self.maximum_bytes} bytes is below the guarantee of {self.guaranteed_bytes}"
            )


NO_QUOTA = Quota()


def check_quotas(quotas: Mapping[str, Quota], budget_bytes: int) -> None:
    """Raise ConfigError where more is guaranteed than there is."""
    guaranteed = sum(quota.guaranteed_bytes for quota in quotas.values())
    if guaranteed > budget_bytes:
        raise ConfigError(
            f"the guarantees of all tenants are {guaranteed} bytes, the cache's budget is {budget_bytes}; "
            "raise the budget or lower a guarantee"
        )


@dataclass
class Account:
    """What each tenant uses, and what one of them still needs; evictions are tried on it.

    Attributes:
        budget_bytes: of the cache.
        quotas: of the tenants that have one.
        used_bytes: by tenant, reserved and resident.
        lost_bytes: what quarantined files take, of no tenant.
        is_cut: the disk was full before the budget was: then what is guaranteed but not used is nobody's.
    """

    budget_bytes: int
    quotas: Mapping[str, Quota]
    used_bytes: dict[str, int] = field(default_factory=dict)
    lost_bytes: int = 0
    is_cut: bool = False

    @property
    def total_bytes(self) -> int:
        """All that lies on the disk or is about to."""
        return sum(self.used_bytes.values()) + self.lost_bytes

    def used(self, tenant: str) -> int:
        """Return what a tenant uses."""
        return self.used_bytes.get(tenant, 0)

    def available(self, tenant: str) -> int:
        """Return the most that a tenant may use in all, were everything evicted that others have above guarantees."""
        guaranteed_to_others = sum(quota.guaranteed_bytes for name, quota in self.quotas.items() if name != tenant)
        most = self.budget_bytes - guaranteed_to_others
        maximum = self.quota(tenant).maximum_bytes
        return most if maximum is None else min(most, maximum)

    def missing(self, tenant: str, size_bytes: int) -> int:
        """Return how many bytes more must go before `tenant` may use `size_bytes` more; 0 or less: none."""
        maximum = self.quota(tenant).maximum_bytes
        above = 0 if maximum is None else self.used(tenant) + size_bytes - maximum
        return max(above, self._charged(tenant, size_bytes) - self.budget_bytes)

    def helps(self, owner: str, tenant: str, freed_bytes: int, size_bytes: int) -> bool:
        """Return whether evicting `freed_bytes` of `owner` is allowed for `tenant`, and brings it nearer."""
        if owner == tenant:
            return self.is_cut or self.used(tenant) + size_bytes > self.quota(tenant).guaranteed_bytes
        maximum = self.quota(tenant).maximum_bytes
        if maximum is not None and self.used(tenant) + size_bytes > maximum:
            return False  # only its own can go
        return self.used(owner) - freed_bytes >= self.quota(owner).guaranteed_bytes

    def evict(self, owner: str, freed_bytes: int) -> None:
        """Take `freed_bytes` off what `owner` uses."""
        self.used_bytes[owner] = self.used(owner) - freed_bytes

    def quota(self, tenant: str) -> Quota:
        """Return what is set for a tenant."""
        return self.quotas.get(tenant, NO_QUOTA)

    def _charged(self, tenant: str, size_bytes: int) -> int:
        names = {*self.quotas, *self.used_bytes, tenant}
        charged = self.lost_bytes
        for name in names:
            used = self.used(name) + (size_bytes if name == tenant else 0)
            charged += used if self.is_cut else max(used, self.quota(name).guaranteed_bytes)
        return charged
