"""PyPI's gcp-storage-emulator as a process of its own, with the condition `ifGenerationMatch` that it lacks.

Run as a program it prints its port, then serves until its standard input ends: with the process that started it.
"""

import importlib.util
import os
import secrets
import subprocess
import sys
from contextlib import ExitStack
from http import HTTPStatus

import fsspec
import pytest

from tests.support import servers

# Read by gcsfs when it is imported. It would look up the kind of each bucket by gRPC, which the emulator lacks.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
# With this argument the program serves as the emulator comes: it ignores the condition.
UNCONDITIONAL = "unconditional"


def refusal():
    """Return why the server does not run here, or None where it does."""
    if servers.are_replaced():
        return servers.REPLACED
    missing = [name for name in ("gcsfs", "gcp_storage_emulator") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


class GoogleServer:
    """The server, running from `start` to `close`; `*words` are arguments of the program."""

    def __init__(self, *words):
        self._words = words

    def start(self):
        """Start it; returns when it answers."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *self._words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def close(self):
        """End the process."""
        self._process.communicate()


def serve(*words):
    """Yield the URL of a new bucket on a server of its own; skip where none is installed. For `words`, see `main`."""
    if reason := refusal():
        pytest.skip(f"no Google Cloud Storage: {reason}")
    import gcsfs

    server = GoogleServer(*words).start()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        stack.callback(server.close)
        stack.callback(gcsfs.GCSFileSystem.clear_instance_cache)
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        patch.setitem(fsspec.config.conf, "gs", {"token": "anon"})  # fsspec read the variable when it was imported
        patch.setenv("FSSPEC_GS_TOKEN", "anon")  # for child processes
        gcsfs.GCSFileSystem.clear_instance_cache()
        bucket = f"datasvc-{secrets.token_hex(4)}"
        gcsfs.GCSFileSystem(token="anon").mkdir(bucket)
        yield f"gs://{bucket}"


def insert_if_absent(insert):
    """Wrap the emulator's handler of uploads: refuse those with `ifGenerationMatch=0` where there is an object.

    The emulator serves one request at a time, so nothing comes between the look and the write.
    """
    from gcp_storage_emulator.exceptions import NotFound

    def handler(request, response, storage, *args, **kwargs):
        if request.query.get("ifGenerationMatch") == ["0"]:
            name = (request.query.get("name") or [None])[0] or request.data["meta"]["name"]
            try:
                storage.get_file_obj(request.params["bucket_name"], name)
            except NotFound:
                pass
            else:
                response.status = HTTPStatus.PRECONDITION_FAILED
                response.json({"error": {"code": 412, "message": "conditionNotMet"}})
                return
        insert(request, response, storage, *args, **kwargs)

    return handler


def main():
    """Serve until standard input ends."""
    from gcp_storage_emulator.handlers import objects

    if UNCONDITIONAL not in sys.argv:
        objects.insert = insert_if_absent(objects.insert)  # before `server` makes its table of handlers
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    sys.stdout.write(f"{server._api._httpd.server_address[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
