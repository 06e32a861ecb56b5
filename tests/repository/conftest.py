"""Stores to test on: local files, memory, and S3 over HTTP (moto's server, which is in the dev extra)."""

import os
import secrets

import pytest
from moto.server import ThreadedMotoServer


@pytest.fixture(scope="session")
def s3_bucket():
    """Start an S3 server on loopback and return the URL of a bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    import s3fs

    bucket = f"datasvc-{secrets.token_hex(4)}"
    s3fs.S3FileSystem().mkdir(bucket)
    yield f"s3://{bucket}"
    server.stop()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(params=["local", "memory", "s3"])
def url(request, tmp_path):
    """An empty folder on each kind of store."""
    if request.param == "local":
        return str(tmp_path / "store")
    if request.param == "memory":
        return f"memory://{secrets.token_hex(8)}"
    return f"{request.getfixturevalue('s3_bucket')}/{secrets.token_hex(8)}"
