"""Host discovery: runs the user's script periodically and reports the hosts to the driver if they have changed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Self

from datasvc.trainer.launch.ranks.hosts import parse_host_file
from datasvc.trainer.launch.ranks.job import Host

# A script that takes longer is assumed to hang, and is killed.
_SCRIPT_TIMEOUT_S = 60.0


class DiscoveryError(Exception):
    """The discovery script failed, or its output is not a list of hosts; the previous hosts stay valid."""


def run_discovery(script: str, *, default_slots: int, timeout_s: float = _SCRIPT_TIMEOUT_S) -> tuple[Host, ...]:
    """Run the script and return the hosts that it prints, as lines `host` or `host:slots`.

    Args:
        script: command line for a shell, usually a path.
        default_slots: number of slots of a host whose line gives none; a slot is the place of one rank.
        timeout_s: time after which the script and its children are killed.

    Raises:
        DiscoveryError: the script fails, takes too long, or does not print hosts.
    """
    process = subprocess.Popen(  # noqa: S602 - the user's own command line
        script,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A separate process group, so that the script can be killed with its children.
        process_group=0,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise DiscoveryError(f"'{script}' took longer than {timeout_s:g} s") from None
    finally:
        # The kill is safe: without a return code the process is not reaped, so no other group can have its number.
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        last_line = errors.strip().splitlines()[-1:] or ["it printed no error"]
        raise DiscoveryError(f"'{script}' exited with status {process.returncode}: {last_line[0]}")
    try:
        return parse_host_file(output, default_slots=default_slots)
    except ValueError as error:
        raise DiscoveryError(f"the output of '{script}' is not a list of hosts: {error}") from None


class Discovery:
    """Periodic host discovery in a background thread, as a context manager.

    Args:
        script, default_slots: see `run_discovery`.
        interval_s: seconds between the end of one run of the script and the start of the next.
        on_hosts: callback that gets the hosts, after the first run and after each change; called from the thread.
        on_error: callback that gets the message of a failure, if the run before did not fail with the same message;
            called from the thread. The script runs again after a failure.
    """

    def __init__(
        self,
        script: str,
        *,
        default_slots: int,
        interval_s: float,
        on_hosts: Callable[[tuple[Host, ...]], None],
        on_error: Callable[[str], None],
    ) -> None:
        self._script = script
        self._default_slots = default_slots
        self._interval_s = interval_s
        self._on_hosts = on_hosts
        self._on_error = on_error
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-discovery", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The thread is not joined: a script that hangs must not delay the end of the job.
        self._stopped.set()

    def _run(self) -> None:
        previous_hosts: tuple[Host, ...] | None = None
        last_error: str | None = None
        while not self._stopped.is_set():
            try:
                hosts = run_discovery(self._script, default_slots=self._default_slots)
            except DiscoveryError as error:
                if str(error) != last_error:
                    last_error = str(error)
                    self._on_error(last_error)
            else:
                last_error = None
                if hosts != previous_hosts:
                    previous_hosts = hosts
                    self._on_hosts(hosts)
            self._stopped.wait(self._interval_s)
