"""Stores to test on: local files, memory, and S3 over HTTP."""

import secrets

import pytest


@pytest.fixture(params=["local", "memory", "s3"])
def url(request, tmp_path):
    """An empty folder on each kind of store."""
    if request.param == "local":
        return str(tmp_path / "store")
    if request.param == "memory":
        return f"memory://{secrets.token_hex(8)}"
    return f"{request.getfixturevalue('s3_bucket')}/{secrets.token_hex(8)}"
