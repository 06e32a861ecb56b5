"""A real S3 server on loopback: one Ceph monitor, manager, object store in memory and gateway, as child processes.

Used where its programs are installed, see `tests/conftest.py`. It refuses what a gateway in production refuses, and
unlike simpler servers it honours `If-None-Match` as S3 does.
"""

import shutil
import socket
import subprocess
import uuid
from contextlib import ExitStack

from tests.support import servers

PROGRAMS = ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph-mgr", "ceph", "ceph-authtool")
KEY, SECRET = "TESTKEY", "TESTSECRET"
_STARTS_WITHIN_S = 90
_TICK_S = 0.1
_STORE_BYTES = 2 << 30


def refusal():
    """Return why the server does not run here, or None where it does."""
    if servers.are_replaced():
        return servers.REPLACED
    if all(shutil.which(program) for program in PROGRAMS):
        return None
    return "no Ceph gateway is installed: radosgw ceph-mon ceph-osd ceph-mgr ceph-common"


class CephServer:
    """The server, running from `start` to `close`.

    Args:
        folder: an empty folder for its files.
        ports: of the gateway, and two of the monitor.
    """

    def __init__(self, folder, ports):
        self._folder = folder
        self._config = folder / "ceph.conf"
        self._running = []
        self.port, *self._monitor_ports = ports

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        """Start everything; returns when the gateway answers and its user exists. Raises RuntimeError."""
        self._configure()
        with ExitStack() as stack:
            stack.callback(self.close)
            address = self._monitor_address()
            keyring = str(self._folder / "keyring")
            self._run(
                "ceph-mon",
                "--id",
                "a",
                "--mkfs",
                "--mon-initial-members",
                "a",
                "--mon-host",
                address,
                "--keyring",
                keyring,
            )
            self._serve("ceph-mon", "--id", "a")
            number = self._run("ceph", "osd", "create").strip().splitlines()[-1]
            self._run("ceph-osd", "--id", number, "--mkfs")
            self._serve("ceph-osd", "--id", number)
            self._serve("ceph-mgr", "--id", "x")
            gateway = self._serve("radosgw", "-n", "client.rgw")
            self._wait_for_port(gateway)
            words = [
                "user",
                "create",
                "--uid=test",
                "--display-name=test",
                f"--access-key={KEY}",
                f"--secret={SECRET}",
            ]
            self._run("radosgw-admin", "-n", "client.rgw", *words)
            stack.pop_all()
        return self

    def close(self):
        """Stop every process that `start` started."""
        for process in reversed(self._running):
            process.kill()
            process.wait()
        self._running.clear()

    def _configure(self):
        folder = self._folder
        for name in ("mon", "osd", "mgr", "rgw", "log"):
            (folder / name).mkdir(parents=True)
        settings = {
            "fsid": uuid.uuid4(),
            "mon host": self._monitor_address(),
            "keyring": folder / "keyring",
            "run dir": folder,
            "admin socket": f"{folder}/$name.asok",
            "log file": f"{folder}/log/$name.log",
            "auth cluster required": "cephx",
            "auth service required": "cephx",
            "auth client required": "cephx",
            "osd pool default size": 1,
            "osd pool default min size": 1,
            "osd crush chooseleaf type": 0,
            "osd objectstore": "memstore",
            "memstore device bytes": _STORE_BYTES,
            "mon data": folder / "mon",
            "osd data": folder / "osd",
            "mgr data": folder / "mgr",
            "rgw data": folder / "rgw",
            "mon allow pool size one": "true",
            "mon warn on pool no redundancy": "false",
            "ms bind ipv6": "false",
            "rgw frontends": f"beast endpoint=127.0.0.1:{self.port}",
        }
        lines = [f"{name} = {value}\n" for name, value in settings.items()]
        self._config.write_text("[global]\n" + "".join(lines), encoding="utf-8")
        keyring = str(folder / "keyring")
        self._run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        for name in ("client.admin", "osd.0", "mgr.x", "client.rgw"):
            caps = [word for kind in ("mon", "osd", "mgr") for word in ("--cap", kind, "allow *")]
            self._run("ceph-authtool", keyring, "--gen-key", "-n", name, *caps)

    def _monitor_address(self):
        new, old = self._monitor_ports
        return f"[v2:127.0.0.1:{new},v1:127.0.0.1:{old}]"

    def _run(self, program, *words):
        command = [program, *words] if program == "ceph-authtool" else [program, "-c", str(self._config), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_STARTS_WITHIN_S)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
        return done.stdout

    def _serve(self, program, *words):
        with open(self._folder / "log" / f"{program}.out", "wb") as output:
            command = [program, "-c", str(self._config), "-f", *words]
            self._running.append(subprocess.Popen(command, stdout=output, stderr=output))
        return self._running[-1]

    def _wait_for_port(self, gateway):
        for _ in range(int(_STARTS_WITHIN_S / _TICK_S)):
            with socket.socket() as connection:
                if connection.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            try:
                status = gateway.wait(timeout=_TICK_S)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError(f"the gateway ended with status {status}; see {self._folder}/log")
        raise RuntimeError(f"the gateway did not answer within {_STARTS_WITHIN_S} s; see {self._folder}/log")
