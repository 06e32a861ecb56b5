"""Namespaces of the kernel, held open by one process.

They last as long as that process, and that one as long as its standard input is open. So nothing is left however we
end: neither names nor links nor processes.
"""

import subprocess


class RefusedError(Exception):
    """This machine does not let us make namespaces; the message says what was refused."""


class Namespace:
    """Namespaces that last as long as the process that holds them open.

    Args:
        kinds: options of `unshare`.
    """

    def __init__(self, *kinds):
        # The first process of a process namespace adopts orphans, and must not keep them as zombies.
        holding = "ip link set lo up && echo up && exec env --ignore-signal=CHLD cat"
        try:
            self._holder = subprocess.Popen(
                ["unshare", "--net", *kinds, "sh", "-c", holding],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise RefusedError(f"unshare: {error}") from error
        self.pid = self._holder.pid
        if self._holder.stdout.readline() != "up\n":
            raise RefusedError(f"unshare --net {' '.join(kinds)}: {self._holder.communicate()[1].strip()}")

    def close(self):
        """End it with all that is in it. Returns when every process is gone."""
        self._holder.communicate()

    def entering(self, *words):
        """Return the command that runs `words` in this network."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *words]

    def configure(self, *lines):
        """Carry out lines of `ip -batch` in this network. Raises RefusedError."""
        run(self.entering("ip", "-batch", "-"), "\n".join(lines))

    def limit(self, link, rate):
        """Let `rate` bytes per second out of a link, or everything where that is None. Raises RefusedError."""
        queue = ["noqueue"]
        if rate is not None:
            queue = ["tbf", "rate", f"{round(rate * 8)}bit", "burst", "128kb", "limit", "512kb"]
        run(self.entering("tc", "qdisc", "replace", "dev", link, "root", *queue))


def run(command, text=None):
    """Run a tool of the system, with `text` as its input. Raises RefusedError where it is missing or fails."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RefusedError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise RefusedError(f"{' '.join(command)}: {done.stderr.strip()}")
