"""A parser of command lines that reports a mistake in one line."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line and a hint at `--help`, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake on standard error and exit with status 2."""
        # The message quotes arguments, which may contain newlines.
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")
