"""Quotas of tenants on one cache, and the account of the bytes that each tenant uses. Pure.

The account computes for the eviction policy how many bytes are missing, and which evictions are allowed. The
guaranteed bytes of a tenant are reserved for it, used or not. Any tenant may use the remaining space up to its
maximum. Invariant: a reservation is refused if it would make the quarantined bytes plus the sum over tenants of
max(used, guaranteed) exceed the budget. If the disk became full before the budget was used up, only used bytes count:
unused guarantees reserve nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from datasvc.errors import ConfigError

DEFAULT_TENANT = "default"


@dataclass(frozen=True)
class Quota:
    """Limits of one tenant.

    Attributes:
        guaranteed_bytes: bytes reserved for the tenant, used or not.
        maximum_bytes: limit of the bytes that the tenant may use; None: only the budget limits it.

    Raises:
        ConfigError: the guarantee is negative or above the maximum, or the maximum is less than 1.
    """

    guaranteed_bytes: int = 0
    maximum_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.guaranteed_bytes < 0:
            raise ConfigError(f"a guarantee of {self.guaranteed_bytes} bytes is not valid; expected 0 or more")
        if self.maximum_bytes is not None and self.maximum_bytes < max(1, self.guaranteed_bytes):
            raise ConfigError(
                f"a maximum of {self.maximum_bytes} bytes is not valid; expected at least 1, and not less than the "
                f"guarantee of {self.guaranteed_bytes}"
            )


NO_QUOTA = Quota()


def check_quotas(quotas: Mapping[str, Quota], budget_bytes: int) -> None:
    """Raise ConfigError if the guarantees exceed the budget."""
    guaranteed = sum(quota.guaranteed_bytes for quota in quotas.values())
    if guaranteed > budget_bytes:
        raise ConfigError(
            f"all tenants together are guaranteed {guaranteed} bytes, but the cache's budget is {budget_bytes}; "
            "raise the budget or lower a guarantee"
        )


@dataclass
class Account:
    """Disk space that each tenant uses, and the limits on it: a copy of the catalogue's sums, to plan evictions.

    Attributes:
        budget_bytes: budget of the cache, or a lower limit that was set when the disk was full.
        quotas: quotas of the tenants that have one.
        used_bytes: reserved and resident bytes by tenant.
        quarantined_bytes: bytes of quarantined files, which count for no tenant.
        is_limited_by_disk: whether `budget_bytes` is such a lower limit; unused guarantees are then not reserved.
    """

    budget_bytes: int
    quotas: Mapping[str, Quota]
    used_bytes: dict[str, int] = field(default_factory=dict)
    quarantined_bytes: int = 0
    is_limited_by_disk: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes on the disk, reserved ones included."""
        return sum(self.used_bytes.values()) + self.quarantined_bytes

    def used(self, tenant: str) -> int:
        """Return the bytes that a tenant uses."""
        return self.used_bytes.get(tenant, 0)

    def available(self, tenant: str) -> int:
        """Return the limit of a tenant: the budget minus others' guarantees, or its own maximum if that is lower.

        Quarantined bytes are not subtracted, because the quarantine is emptied before any eviction.
        """
        others = {name: quota.guaranteed_bytes for name, quota in self.quotas.items() if name != tenant}
        if self.is_limited_by_disk:
            # Other tenants keep the bytes that they use within their guarantees; unused guarantees are not reserved.
            others = {name: min(self.used(name), guaranteed) for name, guaranteed in others.items()}
        unreserved_bytes = self.budget_bytes - sum(others.values())
        maximum = self.quota(tenant).maximum_bytes
        return unreserved_bytes if maximum is None else min(unreserved_bytes, maximum)

    def missing(self, tenant: str, size_bytes: int) -> int:
        """Return how many bytes must be evicted before `tenant` may use `size_bytes` more; 0 or less: none."""
        return max(self.above_maximum(tenant, size_bytes), self.above_budget(tenant, size_bytes))

    def above_maximum(self, tenant: str, size_bytes: int) -> int:
        """Return the bytes above the tenant's maximum if the tenant used `size_bytes` more; 0 or less: they fit."""
        maximum = self.quota(tenant).maximum_bytes
        return 0 if maximum is None else self.used(tenant) + size_bytes - maximum

    def above_budget(self, tenant: str, size_bytes: int) -> int:
        """Return the bytes above the budget if a tenant used `size_bytes` more; 0 or less: they fit."""
        return self._charged(tenant, size_bytes) - self.budget_bytes

    def helps(self, victim: str, tenant: str, freed_bytes: int, size_bytes: int) -> bool:
        """Return whether evicting `freed_bytes` of the tenant `victim` is allowed, and makes space for `tenant`.

        Args:
            victim: tenant that is charged for the object to evict.
            tenant: tenant that needs the space.
            freed_bytes: bytes that the eviction frees.
            size_bytes: bytes that `tenant` needs.
        """
        if victim == tenant:
            # Evicting the objects of a tenant below its guarantee frees nothing: the guarantee stays reserved.
            return self.is_limited_by_disk or self.used(tenant) + size_bytes > self.quota(tenant).guaranteed_bytes
        if self.above_maximum(tenant, size_bytes) > 0:
            return False  # `tenant` would exceed its own maximum: only evicting its own objects helps
        # An eviction for another tenant must not take a tenant below its guarantee.
        return self.used(victim) - freed_bytes >= self.quota(victim).guaranteed_bytes

    def evict(self, tenant: str, freed_bytes: int) -> None:
        """Subtract `freed_bytes` from the bytes that a tenant uses, in this account only."""
        self.used_bytes[tenant] = self.used(tenant) - freed_bytes

    def quota(self, tenant: str) -> Quota:
        """Return the quota of a tenant."""
        return self.quotas.get(tenant, NO_QUOTA)

    def _charged(self, tenant: str, size_bytes: int) -> int:
        """Return the bytes that count against the budget if `tenant` uses `size_bytes` more."""
        names = {*self.quotas, *self.used_bytes, tenant}
        charged = self.quarantined_bytes
        for name in names:
            used = self.used(name) + (size_bytes if name == tenant else 0)
            charged += used if self.is_limited_by_disk else max(used, self.quota(name).guaranteed_bytes)
        return charged
