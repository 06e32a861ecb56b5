"""Small Debian systems in folders, and programs that run in them as in a container.

They need root, Debian's packages `mmdebstrap` and `util-linux`, and Debian's archive.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ARCHIVE = "http://deb.debian.org/debian"
# What Debian's images named "-slim" leave out.
LEFT_OUT = ("man", "locale", "doc", "info", "lintian")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# $0: the folder; $1: "ro" or "rw"; $2: folders to mount, as "from:to from:to"; then the words of chroot.
ENTER = """
root=$0 mode=$1 volumes=$2
shift 2
mount --bind "$root" "$root"
mount -o "remount,bind,$mode" "$root"
for each in dev proc; do mount --rbind "/$each" "$root/$each"; done
for each in $volumes; do mount --bind "${each%%:*}" "$root${each##*:}"; done
! command -v ip >/dev/null || ip link set lo up
exec chroot "$@"
"""


def need_chroots(*programs):
    """Skip where such systems cannot be made or entered."""
    missing = [name for name in ("mmdebstrap", "unshare", "nsenter", "chroot", *programs) if not shutil.which(name)]
    if os.geteuid() or missing:
        pytest.skip(f"needs root and the programs mmdebstrap, util-linux {' '.join(programs)}".strip())
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare cannot create mount namespaces here")


def make_system(suite, target, *packages):
    """Install the least of a release of Debian: into a folder, or into a tar file if its name ends in .tar."""
    kept_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT]
    words = ["mmdebstrap", "--quiet", "--variant=apt", "--mode=root", *kept_out]
    words += [f"--include={','.join(packages)}"] if packages else []
    # As Debian's images: packages are not flushed to the disk one by one.
    words += [
        "--dpkgopt=force-unsafe-io",
        "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
        suite,
        target,
        ARCHIVE,
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"Debian {suite} cannot be installed into a folder: {done.stderr.strip().splitlines()[-1]}")


@functools.cache
def pip_options():
    """Return pip's certificates and index of this machine: {"cert": path, "index-url": URL}, where they are set."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    values = dict(line.split("=", 1) for line in listed.splitlines())
    options = {name.rpartition(".")[2]: value.strip("'") for name, value in values.items()}
    return {name: options[name] for name in ("cert", "index-url") if name in options}


def enter(root, *words, variables, volumes=None, user="0:0", folder="/", read_only=False, network=True):
    """Return the words that run a program in a system, with mounts of its own.

    Args:
        root: folder of the system.
        words: the program and its arguments.
        variables: its environment.
        volumes: host folder by the folder in the system at which it is mounted; both must exist.
        user: user and group.
        folder: its working directory.
        read_only: whether it sees the system read-only, except for the volumes.
        network: whether it has the network of the host; else only its own loopback.
    """
    mounts = " ".join(f"{source}:{target}" for target, source in (volumes or {}).items())
    settings = [f"{name}={value}" for name, value in variables.items()]
    begin = ["unshare", "--mount", *([] if network else ["--net"]), "sh", "-ec", ENTER, root]
    return [
        *(*begin, "ro" if read_only else "rw", mounts, f"--userspec={user}", root),
        *("env", "--ignore-environment", f"--chdir={folder}", *settings, *words),
    ]


class Buildah:
    """Builds images into a folder, without a daemon.

    Args:
        folder: folder for everything that is stored.
    """

    def __init__(self, folder):
        self.folder = folder
        self._words = ["buildah", "--root", folder / "store", "--runroot", folder / "run"]

    def __call__(self, command, *words):
        done = subprocess.run([*self._words, command, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.strip()

    def make_base(self, name, archive):
        """Make an image of a system in a tar file."""
        container = self("from", "scratch")
        self("add", container, archive, "/")
        self("commit", "--quiet", "--rm", container, name)

    def build(self, name, context, *options):
        """Build an image; its RUN lines use the certificates and the package index of this machine."""
        settings = pip_options()
        certificates = self.folder / "certificates.crt"
        shutil.copyfile(settings.get("cert", CERTIFICATES), certificates)
        inside = {**settings, "cert": "/run/certificates.crt"}
        configuration = self.folder / "pip.conf"
        configuration.write_text("\n".join(["[global]", *(f"{key} = {value}" for key, value in inside.items())]))
        volumes = [f"--volume={certificates}:{inside['cert']}:ro", f"--volume={configuration}:/etc/pip.conf:ro"]
        self(
            "build",
            "--isolation=chroot",
            "--format=docker",
            "--layers=false",
            *volumes,
            f"--tag={name}",
            *options,
            context,
        )

    def mount(self, image):
        """Return the folder of a new container of an image."""
        return Path(self("mount", self("from", image)))

    def configuration(self, image):
        """Return the configuration of an image, as in the specification of OCI."""
        return json.loads(self("inspect", "--type=image", image))["OCIv1"]["config"]

    def healthcheck(self, image):
        """Return the words of its health check, which only the format of Docker has."""
        return json.loads(self("inspect", "--type=image", image))["Docker"]["config"]["Healthcheck"]["Test"]

    def compressed_bytes(self, image):
        """Return the size of an image as a registry stores it."""
        target = self.folder / "pushed"
        self("push", "--quiet", image, f"dir:{target}")
        return sum(path.stat().st_size for path in target.iterdir())

    def close(self):
        """Remove all containers and images."""
        self("rm", "--all")
        self("rmi", "--all", "--force")
