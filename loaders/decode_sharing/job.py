"""Description of a decoding process's work, and the start of that process."""

from __future__ import annotations

import json
import pickle  # to a process that this one starts
import socket
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from datasvc.child_process import command_of, environment
from datasvc.errors import ConfigError
from datasvc.loaders.decode_sharing.loader_spec import LoaderSpec
from datasvc.loaders.decode_sharing.settings import DecodeGroup
from datasvc.loaders.decode_sharing.step_index import StepIndex


@dataclass(frozen=True)
class ServerJob:
    """The work of a decode server.

    Attributes:
        spec: pickled `LoaderSpec`; the server unpickles it later, so that it can report a missing module as an error.
        step_index: the steps of a run.
        group: settings of the decode group.
        fingerprint: settings that must be equal in all consumers, JSON values by name.
    """

    spec: bytes
    step_index: StepIndex
    group: DecodeGroup
    fingerprint: Mapping[str, Any]

    @classmethod
    def plan(
        cls, group: DecodeGroup, *, spec: LoaderSpec, step_index: StepIndex, fingerprint: Mapping[str, Any]
    ) -> ServerJob:
        """Return the work of a decode group's server.

        Raises:
            ConfigError: the loader's settings cannot be pickled.
        """
        try:
            pickled = pickle.dumps(spec)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"decode_group={group.name!r} cannot send the loader's settings to another process: {error}; use "
                "functions and classes that are defined in a module, no lambdas"
            ) from error
        # A JSON round trip, so that it compares equal to a received fingerprint: JSON turns tuples into lists.
        common = json.loads(json.dumps({**fingerprint, **group.common}, default=repr))
        return cls(pickled, step_index, group, common)

    def describe_mismatch(self, other: Mapping[str, Any]) -> str:
        """Return an error message that names the settings in which another job's fingerprint differs."""
        mine = self.fingerprint
        differing = [name for name in sorted({*mine, *other}) if mine.get(name) != other.get(name)]
        values = "; ".join(f"{name} is {mine.get(name)!r} here and {other.get(name)!r} there" for name in differing)
        return (
            f"the jobs of the decode group {self.group.name!r} decode other batches than this job: {values}; give "
            "this job another group name or the same settings"
        )


def start_server(job: ServerJob, listener: socket.socket) -> int:
    """Start the decoding process on a listening socket, detached from this process and its terminal.

    Returns:
        Process id of the decoding process.

    Raises:
        OSError: the process cannot be created.
    """
    process = subprocess.Popen(  # noqa: S603 - one of our own modules
        command_of("datasvc.loaders.decode_sharing.server", str(listener.fileno())),
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # an inherited pipe would stay open for its reader as long as the server runs
        stderr=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:
        pickle.dump(job, pipe)
    # Reap the process when it exits; otherwise it stays a zombie as long as this process runs.
    threading.Thread(target=process.wait, daemon=True, name="datasvc-decode").start()
    return process.pid
