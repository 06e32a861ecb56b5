"""What runs as a rank of ``trainer.run``: fetches the call, makes it, sends its result or exception back."""

import os
import sys
import traceback

from trainer.function.pickling import call_pickled, pickle_error, pickle_result
from trainer.function.post import ask, tell

PORT, KEY = "TRAINER_POST_PORT", "TRAINER_POST_KEY"


def main() -> None:
    """Exits with status 1 if the function raised."""
    address = (os.environ["MASTER_ADDR"], int(os.environ.pop(PORT)))
    # Not for what the function may start.
    key = bytes.fromhex(os.environ.pop(KEY))
    try:
        result = call_pickled(ask(address, key))
        answer = pickle_result(_rank(), result)
    except BaseException as error:
        if isinstance(error, SystemExit) and _may_leave():
            raise
        traceback.print_exc()
        tell(address, key, pickle_error(_rank(), error))
        # Through SystemExit, not os._exit: the trainer leaves its job in order, and other ranks hear of it.
        sys.exit(1)
    tell(address, key, answer)


def _may_leave() -> bool:
    """Whether the process may end without an answer: one that an elastic job has no place for."""
    return "TRAINER_ELASTIC_WORKER" in os.environ


def _rank() -> int:
    # In an elastic job the rank changes; only the runtime knows it, if the function has used it.
    runtime = sys.modules.get("trainer.runtime")
    if runtime is not None and runtime.is_initialized():
        return int(runtime.rank())
    return int(os.environ.get("RANK", "0"))
