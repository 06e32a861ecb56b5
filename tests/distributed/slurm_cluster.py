"""A cluster of Slurm whose two nodes are processes of this machine: munged, slurmctld and two slurmd on loopback."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun")
_MAX_WAIT_S = 120  # above what anything takes on a busy machine
SEARCH_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is requeued waits until the credentials of its first start have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
JobRequeue=1
Prolog={folder}/prolog
Epilog={folder}/epilog
PrologFlags=Alloc
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""


def why_not():
    """Return why there can be no cluster here; "" if there can be one."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=SEARCH_PATH) is None]
    if missing:
        return f"needs Slurm and munge (Debian: slurmctld slurmd slurm-client munge): no {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "only root starts nodes of Slurm"


class SlurmCluster:
    """The cluster, with the prolog and the epilog of deploy/slurm.

    Args:
        folder: for its files; short, because a socket is in it.
        scripts: environment of prolog and epilog.
        ports: of the controller and of the nodes.
    """

    def __init__(self, folder, scripts, ports):
        self.folder = folder
        self.environment = {**os.environ, "PATH": SEARCH_PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("prolog", "epilog"):
            script = Path(__file__).parents[2] / f"deploy/slurm/{name}.sh"
            exports = "".join(f"export {key}='{value}'\n" for key, value in scripts.items())
            (folder / name).write_text(f"#!/bin/bash\n{exports}exec {script}\n")
            (folder / name).chmod(0o755)
        values = {"host": socket.gethostname(), "ports": ports, "folder": folder}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        self._started = []

    def __enter__(self):
        try:
            files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
            files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
            self._start("munged", "--foreground", "--force", *(f"--{k}={self.folder / v}" for k, v in files.items()))
            self._start("slurmctld", "-D", "-c")
            for node in ("one", "two"):
                self._start("slurmd", "-D", "-N", node)
            # Answers as soon as both nodes have registered.
            self.run("srun", "--nodes=2", "--ntasks=2", "true")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        # A node does not end before its jobs have ended, and for that it needs the other programs.
        self.run("scancel", "--user=root", check=False)
        self.wait_until(lambda: not self.run("squeue", "--noheader", check=False))
        for process in reversed(self._started):
            process.terminate()
            try:
                process.wait(_MAX_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @staticmethod
    def wait_until(is_true):
        """Ask until the answer is yes; fail after a long time."""
        deadline = time.monotonic() + _MAX_WAIT_S
        while not is_true():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def run(self, *words, check=True):
        done = subprocess.run(
            list(map(str, words)),
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            timeout=_MAX_WAIT_S,
        )
        assert done.returncode == 0 or not check, (words, done.stderr, self.logs())
        return done.stdout

    def submit(self, script, *options):
        """Submit a script; returns the number of the job."""
        path = self.folder / f"script-{secrets.token_hex(4)}"
        path.write_text(script)
        output = f"--output={path}.out"
        return int(self.run("sbatch", "--parsable", "--chdir", self.folder, output, *options, path))

    def job(self, number):
        """Return the fields of a job, as `scontrol` shows them."""
        text = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def end_of(self, number):
        """Wait for the end of a job; returns its fields."""
        self.wait_until(lambda: self.job(number)["JobState"] not in {"PENDING", "RUNNING", "COMPLETING"})
        return self.job(number)

    def logs(self):
        return "\n".join(path.read_text()[-3000:] for path in self.folder.glob("*.log"))

    def _start(self, *words):
        with open(self.folder / f"{words[0]}.output", "ab") as output:
            self._started.append(subprocess.Popen(words, env=self.environment, stdout=output, stderr=output))
