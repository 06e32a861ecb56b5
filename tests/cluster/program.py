"""A program that runs inside a node of the cluster."""

import os
import signal
import subprocess
from multiprocessing.connection import wait

TIMEOUT_S = 60.0
_TAIL_BYTES = 16000
_WRITES_S = 2.0
# A shell that waited for a program tells by such a status which signal ended it.
_SHELL_SIGNAL = 128


class Program:
    """A running program. Its standard output is a pipe for its reader, its standard error the file `errors`.

    Args:
        entry: the process started from here; the program itself, or what entered the node for it and waits.
        pid: the program's own, as seen from here.
        errors: the file that takes its standard error.
    """

    def __init__(self, entry, pid, errors):
        self._entry = entry
        self._errors = errors
        self.pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already, and whoever entered for it has seen so
            self._pidfd = None

    def errors(self):
        """Return the end of what it wrote to standard error."""
        return self._errors.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")

    def send_signal(self, number):
        """Send a signal to the program, and to none of its children; harmless where it has ended."""
        if self._pidfd is not None and not self.has_ended(timeout_s=0):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self):
        """Kill it and wait until it is gone, with every lock that it held."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def has_ended(self, timeout_s=TIMEOUT_S):
        """Return whether it ends within that time."""
        return self._pidfd is None or wait_for_end(self._pidfd, timeout_s)

    def wait(self, timeout_s=TIMEOUT_S):
        """Return its exit status, negative for a signal. Raises AssertionError where it does not end in time."""
        assert self.has_ended(timeout_s), f"{self._entry.args} runs after {timeout_s} s: {self._stacks()}"
        status = self._entry.wait(timeout_s)
        return _SHELL_SIGNAL - status if status > _SHELL_SIGNAL else status

    def finish(self, timeout_s=TIMEOUT_S):
        """Return what it prints until it ends. Raises AssertionError where it fails or does not end in time."""
        try:
            output, _ = self._entry.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self._entry.args} runs after {timeout_s} s: {self.errors()}") from None
        assert self._entry.returncode == 0, (
            f"{self._entry.args} ended with {self._entry.returncode}: {output}{self.errors()}"
        )
        return output

    def read_line(self, containing=""):
        """Return the next line of its output that has `containing` in it. Raises AssertionError where none comes."""
        for line in self._entry.stdout:
            if containing in line:
                return line
        raise AssertionError(f"{self._entry.args} ended with {self.wait()}, no line {containing!r}: {self.errors()}")

    def _stacks(self):
        """Return its errors, with where its threads are if it writes that on SIGUSR1; otherwise that ends it."""
        self.send_signal(signal.SIGUSR1)
        self.has_ended(_WRITES_S)
        return self.errors()

    def close(self):
        """Give back what only this process holds; the program must be gone."""
        self.wait()
        self._entry.stdout.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def wait_for_end(pidfd, timeout_s=TIMEOUT_S):
    """Return whether the process behind a descriptor ends within that time."""
    return bool(wait([pidfd], timeout_s))
