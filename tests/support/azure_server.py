"""Azurite, Microsoft's emulator of Azure Blob Storage, on loopback: a child process that keeps its blobs in memory.

It is a program of Node.js: `npm install azurite`, and `node_modules/.bin` in PATH. `.ci/run` installs it where there
is npm.
"""

import importlib.util
import re
import shutil
import subprocess

from tests.support import servers

PROGRAM = "azurite-blob"
# The account that every Azurite has; both are in its documentation.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def refusal():
    """Return why the server does not run here, or None where it does."""
    if servers.are_replaced():
        return servers.REPLACED
    if importlib.util.find_spec("adlfs") is None:
        return "adlfs is not installed"
    return None if shutil.which(PROGRAM) else f"no {PROGRAM} in PATH: npm install azurite"


class AzureServer:
    """The server, running from `start` to `close`.

    Args:
        folder: an empty folder for its files.
    """

    def __init__(self, folder):
        self._folder = folder

    def start(self):
        """Start it; returns when it answers. Raises RuntimeError."""
        words = ["--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence"]
        words += ["--silent", "--disableTelemetry"]  # its log of requests would fill the pipe; it sends nothing
        self._process = subprocess.Popen(
            # It refuses the versions of the protocol that are newer than itself; those of a client often are.
            [shutil.which(PROGRAM), *words, "--skipApiVersionCheck"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._folder,
        )
        said = []
        for line in self._process.stdout:
            said.append(line)
            if found := re.search(r"successfully listens on (http://\S+)", line):
                self.url = found[1]
                return self
        self.close()
        raise RuntimeError(f"{PROGRAM} ended: {''.join(said)}")

    @property
    def connection_string(self):
        """What AZURE_STORAGE_CONNECTION_STRING is set to."""
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={self.url}/{ACCOUNT};"
        )

    def close(self):
        """End the process."""
        self._process.kill()
        self._process.communicate()
