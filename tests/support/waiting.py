"""Whether a thread has come to where it waits: what a test needs before it lets the thread go on."""

import inspect
import sys


def waits_in(thread, function):
    """Return True once a started thread waits in a function, False once it has ended without.

    `function` is the innermost one of Python: `threading.Condition.wait`, or that which takes a lock.
    """
    code = inspect.unwrap(function).__code__
    while thread.is_alive():
        frame = sys._current_frames().get(thread.ident)
        if frame is not None and frame.f_code is code:
            return True
    return False
