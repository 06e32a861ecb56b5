"""Where calls wait until a test opens the gate."""

import threading


class Gate:
    """Holds calls back.

    Attributes:
        begun: set once a call has come.
        error: what calls raise once the gate is open; None: they go on.
    """

    def __init__(self):
        self.begun, self.error = threading.Event(), None
        self._opened = threading.Event()

    def open(self):
        """Let all calls go on, those that come later included."""
        self._opened.set()

    def close(self):
        """Hold back the calls that come from now on."""
        self._opened.clear()

    def wait(self, *_arguments):
        """Wait until the gate is open."""
        self.begun.set()
        assert self._opened.wait(120)
        if self.error is not None:
            raise self.error

    def before(self, function):
        """Return a function whose calls wait here, and then call `function`."""

        def call(*arguments, **options):
            self.wait()
            return function(*arguments, **options)

        return call
