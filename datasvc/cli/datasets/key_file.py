"""Reading of keys or names from a file or from standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from datasvc.errors import ConfigError, NotFoundError


def read_keys(path: str) -> list[str]:
    """Return the non-empty lines of a file; "-" is standard input. For errors, see `read_lines`."""
    return [line for line in read_lines(path, "keys") if line]


def read_lines(path: str, what: str) -> list[str]:
    """Return the lines of a text file, without empty lines at its end.

    Args:
        path: file to read; "-" is standard input.
        what: what the file contains, such as "keys", for error messages.

    Raises:
        NotFoundError: the file does not exist.
        ConfigError: `path` is a folder, or the file is not UTF-8.
    """
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        # Editors on Windows begin a file with a byte-order mark, which would become part of the first key.
        text = raw.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise NotFoundError(f"file {path} with the {what} does not exist; check the path") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder; expected a file with {what}, one per line") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); expected a text file with {what}, one per line") from error
    return [line.removesuffix("\r") for line in text.rstrip("\r\n").split("\n")]
