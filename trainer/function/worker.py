"""The program of each rank of `datasvc.trainer.run`: fetches the call, runs it, and sends back its result."""

from __future__ import annotations

import dataclasses
import os
import sys

from datasvc.trainer.function.call_server import fetch_call, send_answer
from datasvc.trainer.function.pickling import call_pickled, pickle_error, pickle_result
from datasvc.trainer.rendezvous.messages import WORKER_VARIABLE, LeaveJob

# The environment variables with the port of the call server and with the key of the job.
PORT, KEY = "TRAINER_POST_PORT", "TRAINER_POST_KEY"


def main() -> None:
    """Run the call; exit with status 1 after an exception. In an elastic job, `sys.exit(N)` keeps status N."""
    worker = os.environ.get(WORKER_VARIABLE)
    address = (os.environ["MASTER_ADDR"], int(os.environ.pop(PORT)))
    # Remove the key from the environment, so that processes started by the function do not inherit it.
    key = bytes.fromhex(os.environ.pop(KEY))
    try:
        result = call_pickled(fetch_call(address, key))
        answer = pickle_result(_rank(), result)
    except LeaveJob:
        # The elastic job has no rank for this process any more. It exits with status 0 and has nothing to report.
        raise
    except BaseException as error:
        has_left = isinstance(error, SystemExit) and error.code in (None, 0)
        send_answer(address, key, dataclasses.replace(pickle_error(_rank(), error), worker=worker, has_left=has_left))
        if worker is not None and isinstance(error, SystemExit):
            raise
        # In an elastic job, this hook also reports the error to the driver.
        sys.excepthook(type(error), error, error.__traceback__)
        # SystemExit, not os._exit: the exit handlers shut the trainer down, which notifies the other ranks.
        sys.exit(1)
    send_answer(address, key, dataclasses.replace(answer, worker=worker))


def _rank() -> int:
    """Return the current rank; in an elastic job it may differ from RANK."""
    # If the function has called init(), the runtime is imported and has the current rank.
    runtime = sys.modules.get("datasvc.trainer.job.runtime")
    if runtime is not None and runtime.is_initialized():
        return int(runtime.rank())
    return int(os.environ.get("RANK", "0"))
