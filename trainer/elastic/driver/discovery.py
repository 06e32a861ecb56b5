"""Asks a script, again and again, which hosts there are."""

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

_SCRIPT_TIMEOUT_S = 60.0


class DiscoveryError(Exception):
    """The script failed, or printed something else than hosts. What was known before stands."""


def run_discovery(script: str, *, default_slots: int, timeout_s: float = _SCRIPT_TIMEOUT_S) -> tuple[Host, ...]:
    """The hosts that the script prints: lines `host` or `host:slots`.

    Args:
        script: a shell's command line, usually a path.
        default_slots: of lines without slots.
        timeout_s: a script that takes longer is ended, with what it has started.

    Raises:
        DiscoveryError: it cannot be run, fails, takes too long, or prints no hosts.
    """
    process = subprocess.Popen(  # noqa: S602 - the user's own command line
        script,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise DiscoveryError(f"'{script}' took longer than {timeout_s:g} s") from None
    finally:
        # Not reaped before, so the group's number is still its own.
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        last_words = errors.strip().splitlines()[-1:] or ["it says nothing"]
        raise DiscoveryError(f"'{script}' exited with status {process.returncode}: {last_words[0]}")
    try:
        return parse_host_file(output, default_slots=default_slots)
    except ValueError as error:
        raise DiscoveryError(f"what '{script}' prints is no list of hosts: {error}") from None


class Discovery:
    """Runs the script in a thread of its own. A context: leaving it stops that.

    Args:
        script: see `run_discovery`.
        default_slots: likewise.
        interval_s: between the end of one run and the start of the next.
        on_hosts: gets the hosts of the first run and after each change, from the thread.
        on_error: gets each new reason for a failure, from the thread; the script is then asked again.
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
        # Not joined: a script that hangs must not hold up the end of the job.
        self._stopped.set()

    def _run(self) -> None:
        known: tuple[Host, ...] | None = None
        complaint: str | None = None
        while not self._stopped.is_set():
            try:
                hosts = run_discovery(self._script, default_slots=self._default_slots)
            except DiscoveryError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    self._on_error(complaint)
            else:
                complaint = None
                if hosts != known:
                    known = hosts
                    self._on_hosts(hosts)
            self._stopped.wait(self._interval_s)
