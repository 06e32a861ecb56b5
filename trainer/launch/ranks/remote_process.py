"""A rank's process on another host, through a shell that carries three streams there: ssh or srun.

The shell's standard input carries the guard (see `remote_guard`), then what to start, then orders; so nothing of
the environment is seen in a list of processes. The shell needs no orphan guard: when the launcher is gone its input
ends, and with it the rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import threading
import time
from pathlib import Path

from datasvc.trainer.launch.ranks import remote_guard
from datasvc.trainer.launch.ranks.job import describe_end
from datasvc.trainer.launch.ranks.orphan_guard import OrphanGuard, keep_from_forked_children
from datasvc.trainer.launch.ranks.rank_process import DRAIN_TIMEOUT_S, RankEnd, RankProcess, RankStart, wait_for_end

# Reads the guard's length and source from its input. No character in it means anything to any shell.
BOOTSTRAP = "import sys;i=sys.stdin.buffer;exec(i.read(int(i.readline())))"
# How long the shell may take, beyond the grace of the rank, to tell the host and to end itself.
_SHELL_MARGIN_S = 5.0


class RemoteRankProcess(RankProcess):
    """A rank's process on another host. `pid` is that of the shell on this machine.

    Args:
        start: what to run; has a `remote_command`.
        guard: not needed.
        ends: as for a local process.
        grace_s: what the guard leaves between SIGTERM and SIGKILL when the launcher is gone.

    Raises:
        StartError: the shell cannot be started.
        OSError: the files for its output cannot be written, or the launcher's folder is gone.
    """

    def __init__(
        self, start: RankStart, *, guard: OrphanGuard, ends: queue.SimpleQueue[RankEnd], grace_s: float
    ) -> None:
        self._grace_s = grace_s
        self._mark = f"\x1etrainer-{secrets.token_hex(8)} "
        self._has_started = False
        self._shell_has_ended = threading.Event()
        self._orders: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        super().__init__(start, guard=guard, ends=ends)

    def send(self, number: int) -> None:
        """Sends a signal to the process and its children, if the host can be reached."""
        self._orders.put(f"signal {int(number)}\n".encode())

    def begin_end(self, grace_s: float) -> None:
        """Tells the guard to end the process and its children."""
        self._orders.put(f"end {grace_s}\n".encode())
        self._orders.put(None)

    def finish_end(self, deadline_s: float) -> None:
        """Waits for the shell, which ends after the rank, and kills it if it does not."""
        if self._is_closed:
            return
        self._orders.put(None)
        # A host that has not come is not waited for: it hears of the end by the end of its input.
        limit_s = deadline_s + _SHELL_MARGIN_S - time.monotonic() if self._has_started else 0.0
        if not self._shell_has_ended.wait(max(0.0, limit_s)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._shell_has_ended.wait()
        self._is_closed = True
        self._process.wait()

    def _open(self) -> subprocess.Popen[bytes]:
        assert self._start.remote_command is not None
        return self._run(self._start.remote_command, stdin=subprocess.PIPE)

    def _connect(self) -> None:
        assert self._process.stdin is not None
        keep_from_forked_children(self._process.stdin)
        self._orders.put(self._first_order())
        self._pump_output(self._mark.encode(), self._hear)
        threading.Thread(target=self._watch, daemon=True).start()
        # Last, because what was not told to start needs no end. What to do may exceed a pipe, and the host be slow to
        # read it: written by a thread.
        threading.Thread(target=self._write_orders, daemon=True).start()

    def _first_order(self) -> bytes:
        source = Path(remote_guard.__file__).read_bytes()
        order = {
            "mark": self._mark,
            "command": list(self._start.command),
            "environ": dict(self._start.environ),
            "folder": str(Path.cwd()),
            "grace_s": self._grace_s,
            "master_addresses": list(self._start.master_addresses),
            "num_neighbours": self._start.num_neighbours,
        }
        return b"%d\n%s%s\n" % (len(source), source, json.dumps(order).encode())

    def _write_orders(self) -> None:
        assert self._process.stdin is not None
        # A shell that is gone is noticed where its end is awaited.
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            while (order := self._orders.get()) is not None:
                pipe.write(order)
                pipe.flush()

    def _hear(self, report: str) -> None:
        word, _, rest = report.partition(" ")
        if word == "started":
            self._has_started = True
            self.has_come.set()
        elif word == "ended":
            self._report_once(int(rest))
        elif word == "refused":
            status, _, reason = rest.partition(" ")
            self._report_once(int(status), f"was not started: {reason}")

    def _watch(self) -> None:
        returncode = wait_for_end(self.pid)
        self._shell_has_ended.set()
        # The guard's word, if it is still on its way, says more than the shell's.
        self._errors.last_lines(timeout_s=DRAIN_TIMEOUT_S)
        assert self._start.remote_command is not None
        how = f"{self._start.remote_command[0]} to {self.host} {describe_end(returncode)}"
        self._report_once(returncode or 255, f"was {'lost' if self._has_started else 'not started'}: {how}")

    def _report_once(self, returncode: int, trouble: str | None = None) -> None:
        with self._lock:
            if self.is_running:
                self.trouble = trouble
                self._report_end(returncode, has_started=self._has_started)
