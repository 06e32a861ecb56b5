"""Hosts that are this machine behind real sshds."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
SSH = shutil.which("ssh")
SERVER = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
"""
CLIENT = """
Host *
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking accept-new
    IdentitiesOnly yes
    LogLevel ERROR
"""
LISTENING = "Server listening on"

needs_ssh = pytest.mark.skipif(SSHD is None or SSH is None, reason="needs ssh and sshd")


def write_identity(folder):
    """A key that opens this machine's sshds, and their settings; the option of ssh that names the key."""
    if os.geteuid() == 0:
        # Where sshd locks itself in.
        Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=60)
    (folder / "server").write_text(SERVER.format(folder=folder))
    return ("-i", str(folder / "user_key"))


def install_client(folder, environ, settings):
    """Puts an ``ssh`` first on the PATH that has these settings, and notes its process number in ``clients``."""
    (folder / "client").write_text(settings + CLIENT.format(folder=folder))
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\necho $$ >>{folder}/clients\nexec {SSH} -F {folder}/client "$@"\n')
    wrapper.chmod(0o755)
    environ["PATH"] = f"{folder}/bin:{environ['PATH']}"


def skip_without_login(folder, host):
    """Skips the test where ssh does not let its user in."""
    probe = [folder / "bin" / "ssh", "-i", folder / "user_key", "-o", "BatchMode=yes", host, "true"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot log in here: {done.stderr}")


class SshHosts:
    """A daemon for each name, at a port of a loopback address of its own; ``options`` are the launcher's."""

    def __init__(self, folder, environ, port, *names):
        self.options = write_identity(folder)
        self._folder = folder
        self._daemons = {}
        self._port = port
        self._addresses = {name: f"127.0.0.{number}" for number, name in enumerate(names, 2)}
        places = "".join(f"Host {n}\n    HostName {a}\n    Port {port}\n" for n, a in self._addresses.items())
        install_client(folder, environ, places)
        for name in names:
            self.open(name)
        skip_without_login(folder, names[0])

    def open(self, name):
        """Starts the host's sshd; returns when it listens."""
        where = ["-p", str(self._port), "-o", f"ListenAddress={self._addresses[name]}"]
        command = [SSHD, "-D", "-e", "-f", self._folder / "server", *where]
        daemon = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._daemons[name] = daemon
        line = daemon.stderr.readline()
        if LISTENING not in line:
            pytest.skip(f"sshd does not serve here: {line}{daemon.communicate()[1]}")

    def cut(self, name):
        """Kills the host's sshd and those it has for its connections; what these have started lives on."""
        daemon = self._daemons.pop(name)
        # It takes no new ones meanwhile, so none is missed.
        daemon.send_signal(signal.SIGSTOP)
        for pid in [*_descendants(daemon.pid, "sshd"), daemon.pid]:
            os.kill(pid, signal.SIGKILL)
        daemon.communicate()

    def close(self):
        for name in list(self._daemons):
            self.cut(name)


def _descendants(pid, name):
    """The processes of this program below another, parents first."""
    found = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        if Path(f"/proc/{child}/comm").read_text().startswith(name):
            found += [child, *_descendants(child, name)]
    return found
