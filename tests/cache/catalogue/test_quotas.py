"""The account of a cache: whatever is used, guarantees can be kept and the budget holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.catalogue.quotas import Account, Quota, check_quotas
from datasvc.errors import ConfigError

TENANTS = ("a", "b", "c")
quotas = st.builds(
    lambda least, more: Quota(least, None if more is None else max(1, least + more)),
    st.integers(0, 30),
    st.one_of(st.none(), st.integers(0, 50)),
)
accounts = st.builds(
    Account,
    st.integers(20, 150),
    st.dictionaries(st.sampled_from(TENANTS), quotas),
    st.dictionaries(st.sampled_from(TENANTS), st.integers(0, 90)),
    st.integers(0, 20),
    st.booleans(),
)


def charged(account):
    """What counts against the budget: a guarantee counts whether it is used or not."""
    names = {*account.quotas, *account.used_bytes}
    return account.quarantined_bytes + sum(
        account.used(name)
        if account.is_limited_by_disk
        else max(account.used(name), account.quota(name).guaranteed_bytes)
        for name in names
    )


@given(accounts, st.sampled_from(TENANTS), st.integers(0, 100))
def test_nothing_is_missing_exactly_where_budget_guarantees_and_maximum_are_kept(account, tenant, size):
    fits = account.missing(tenant, size) <= 0
    account.used_bytes[tenant] = account.used(tenant) + size
    maximum = account.quota(tenant).maximum_bytes
    assert fits == (charged(account) <= account.budget_bytes and (maximum is None or account.used(tenant) <= maximum))


@given(accounts, st.sampled_from(TENANTS), st.sampled_from(TENANTS), st.integers(1, 50), st.integers(0, 100))
def test_an_eviction_takes_no_tenant_below_its_guarantee_and_brings_room_nearer(account, owner, tenant, freed, size):
    before = account.missing(tenant, size)
    freed = min(freed, account.used(owner))
    if before <= 0 or not account.helps(owner, tenant, freed, size):
        return
    account.evict(owner, freed)
    assert account.missing(tenant, size) <= before
    if owner != tenant:
        assert account.used(owner) >= account.quota(owner).guaranteed_bytes


@given(accounts, st.sampled_from(TENANTS))
def test_a_tenant_gets_its_guarantee_while_the_others_kept_to_the_rules(account, tenant):
    """Others are within what they could reserve: then nothing must be evicted for what is guaranteed."""
    account.is_limited_by_disk = False
    others = Account(
        account.budget_bytes, account.quotas, {**account.used_bytes, tenant: 0}, account.quarantined_bytes
    )
    if charged(others) <= others.budget_bytes:
        quota = others.quota(tenant)
        assert others.missing(tenant, quota.guaranteed_bytes) <= 0


@given(accounts, st.sampled_from(TENANTS))
def test_available_bytes_fit_once_the_others_are_down_to_their_guarantees(account, tenant):
    account.is_limited_by_disk, account.quarantined_bytes = False, 0
    available = account.available(tenant)
    account.used_bytes = {name: quota.guaranteed_bytes for name, quota in account.quotas.items() if name != tenant}
    if available >= account.quota(tenant).guaranteed_bytes:
        assert account.missing(tenant, available) <= 0
    assert account.missing(tenant, available + 1) > 0


@given(accounts, st.sampled_from(TENANTS))
def test_on_a_full_disk_what_is_available_fits_once_the_others_are_down_to_what_cannot_be_evicted(account, tenant):
    """A guarantee that a tenant does not use reserves nothing there."""
    account.is_limited_by_disk, account.quarantined_bytes, account.used_bytes[tenant] = True, 0, 0
    available = account.available(tenant)
    for name in account.used_bytes:
        account.used_bytes[name] = min(account.used(name), account.quota(name).guaranteed_bytes)
    if available >= 0:
        assert account.missing(tenant, available) <= 0
    assert account.missing(tenant, available + 1) > 0


def test_more_guarantees_than_budget_are_refused():
    with pytest.raises(ConfigError, match=r"all tenants together are guaranteed 20 bytes.*raise the budget"):
        check_quotas({"a": Quota(10), "b": Quota(10)}, 19)


@pytest.mark.parametrize(("least", "most"), [(-1, None), (5, 4), (0, 0), (0, -1)])
def test_a_quota_that_makes_no_sense_is_refused(least, most):
    with pytest.raises(ConfigError):
        Quota(least, most)
