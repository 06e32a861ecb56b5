"""Findings by their checks."""


def by_check(findings):
    """Return the findings by name, in their order; no name comes twice."""
    listed = list(findings)
    found = {finding.check: finding for finding in listed}
    assert len(found) == len(listed)
    return found
