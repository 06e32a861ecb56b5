"""What a decoding process is told, and how it is started."""

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

from datasvc.errors import ConfigError
from datasvc.loaders.decode_sharing.loader_spec import LoaderSpec
from datasvc.loaders.decode_sharing.settings import DecodeGroup
from datasvc.loaders.decode_sharing.step_index import StepIndex
from datasvc.orphans import command_of, environment


@dataclass(frozen=True)
class ServerJob:
    """What a server needs to know.

    Attributes:
        recipe: of the loader, pickled: what is missing in the other process is told there like any other error.
        path: the steps of a run.
        share: how it is shared.
        fingerprint: what consumers must agree on, JSON values by name.
    """

    recipe: bytes
    path: StepIndex
    share: DecodeGroup
    fingerprint: Mapping[str, Any]

    @classmethod
    def plan(
        cls, share: DecodeGroup, *, recipe: LoaderSpec, path: StepIndex, fingerprint: Mapping[str, Any]
    ) -> ServerJob:
        """Return the job of a share.

        Raises:
            ConfigError: the recipe cannot be sent to another process.
        """
        try:
            pickled = pickle.dumps(recipe)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"share={share.name!r} cannot send the loader's settings to another process: {error}; use functions "
                "and classes that are defined in a module"
            ) from error
        # As the other side reads it: a tuple is a list there.
        agreed = json.loads(json.dumps({**fingerprint, **share.common}, default=repr))
        return cls(pickled, path, share, agreed)

    def describe_mismatch(self, other: Mapping[str, Any]) -> str:
        """Say in which settings another job's fingerprint differs from this one's."""
        own = self.fingerprint
        differing = [name for name in sorted({*own, *other}) if own.get(name) != other.get(name)]
        said = "; ".join(f"{name} is {own.get(name)!r} here and {other.get(name)!r} there" for name in differing)
        return (
            f"the share {self.share.name!r} decodes other batches than this job asks for: {said}; "
            "choose another name, or the same settings"
        )


def start_server(job: ServerJob, listener: socket.socket) -> int:
    """Start the decoding process on a socket. It outlives this one, and is no part of its terminal session.

    Returns:
        Its process id.

    Raises:
        OSError: no process could be made.
    """
    process = subprocess.Popen(  # noqa: S603 - one of our own modules
        command_of("datasvc.loaders.decode_sharing.server", str(listener.fileno())),
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # whoever reads what this process writes must not wait for that one
        stderr=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:
        pickle.dump(job, pipe)
    # Somebody has to take note of its end while this process lives.
    threading.Thread(target=process.wait, daemon=True, name="datasvc-share").start()
    return process.pid
