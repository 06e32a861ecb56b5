"""What runs as a rank of `datasvc.trainer.run`: fetches the call, makes it, sends its result or exception back."""

from __future__ import annotations

import dataclasses
import os
import sys

from datasvc.trainer.function.pickling import call_pickled, pickle_error, pickle_result
from datasvc.trainer.function.post import ask, tell
from datasvc.trainer.rendezvous.host_update import LeaveJob

PORT, KEY = "TRAINER_POST_PORT", "TRAINER_POST_KEY"


def main() -> None:
    """Exits with status 1 if the function raised; in an elastic job `sys.exit` keeps its meaning."""
    worker = os.environ.get("TRAINER_ELASTIC_WORKER")
    address = (os.environ["MASTER_ADDR"], int(os.environ.pop(PORT)))
    # Not for what the function may start.
    key = bytes.fromhex(os.environ.pop(KEY))
    try:
        result = call_pickled(ask(address, key))
        answer = pickle_result(_rank(), result)
    except LeaveJob:
        raise
    except BaseException as error:
        has_left = isinstance(error, SystemExit) and error.code in (None, 0)
        tell(address, key, dataclasses.replace(pickle_error(_rank(), error), worker=worker, has_left=has_left))
        if worker is not None and isinstance(error, SystemExit):
            raise
        # The hook and not only a traceback: in an elastic job the launcher hears of the error by it.
        sys.excepthook(type(error), error, error.__traceback__)
        # Through SystemExit, not os._exit: the trainer leaves its job in order, and other ranks hear of it.
        sys.exit(1)
    tell(address, key, dataclasses.replace(answer, worker=worker))


def _rank() -> int:
    # In an elastic job the rank changes; only the runtime knows it, if the function has used it.
    runtime = sys.modules.get("datasvc.trainer.job.runtime")
    if runtime is not None and runtime.is_initialized():
        return int(runtime.rank())
    return int(os.environ.get("RANK", "0"))
