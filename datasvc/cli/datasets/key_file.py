"""Keys, or names, that a command is given in a file."""

from __future__ import annotations

import sys
from pathlib import Path

from datasvc.errors import ConfigError, NotFoundError


def read_keys(path: str) -> list[str]:
    """Return the lines of a file that are not empty, or of standard input. Raises ConfigError, NotFoundError."""
    return [line for line in read_lines(path, "keys") if line]


def read_lines(path: str, what: str) -> list[str]:
    """Return the lines of a file of `what`, or of standard input, without empty ones at its end. Raises as above."""
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = raw.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {path} with {what}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder; give a file with {what}, one a line") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the {what} in {path} are not UTF-8 ({error}); they are text, one a line") from error
    return [line.removesuffix("\r") for line in text.rstrip("\r\n").split("\n")]
