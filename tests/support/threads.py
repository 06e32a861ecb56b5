"""Threads of tests: what they return or raise, and where they wait."""

import gc
import inspect
import sys
import threading


def in_thread(work):
    """Start a thread; returns it and the list to which it adds what `work` returns or raises."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def waits_in(thread, function):
    """Return True once a started thread waits in a function, False once it has ended without.

    `function` is the innermost one of Python: `threading.Condition.wait`, or that which takes a lock.
    """
    code = inspect.unwrap(function).__code__
    # `sys._current_frames` locks the list of threads. A collection within it may end a thread, which needs
    # that list too: a deadlock before Python 3.11.9 (python/cpython#106883).
    gc.disable()
    try:
        while thread.is_alive():
            frame = sys._current_frames().get(thread.ident)
            if frame is not None and frame.f_code is code:
                return True
    finally:
        gc.enable()
    return False
