"""Stores to test on: local files, memory, and S3 over HTTP (moto's server, which is in the dev extra)."""

import os
import secrets

import pytest
from moto.server import ThreadedMotoServer


@pytest.fixture(scope="session")
def s3_bucket():
    """Return the URL of a new bucket: on the S3 server that AWS_ENDPOINT_URL names, else on one started here."""
    import s3fs

    with pytest.MonkeyPatch.context() as patch:
        server = None
        if "AWS_ENDPOINT_URL" not in os.environ:
            server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
            server.start()
            host, port = server.get_host_and_port()
            patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
            patch.setenv("AWS_ACCESS_KEY_ID", "test")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        bucket = f"datasvc-{secrets.token_hex(4)}"
        s3fs.S3FileSystem().mkdir(bucket)
        yield f"s3://{bucket}"
        if server is not None:
            server.stop()


@pytest.fixture(params=["local", "memory", "s3"])
def url(request, tmp_path):
    """An empty folder on each kind of store."""
    if request.param == "local":
        return str(tmp_path / "store")
    if request.param == "memory":
        return f"memory://{secrets.token_hex(8)}"
    return f"{request.getfixturevalue('s3_bucket')}/{secrets.token_hex(8)}"
