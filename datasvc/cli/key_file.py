"""Keys that a command is given in a file."""

from __future__ import annotations

import sys
from pathlib import Path

from datasvc.errors import ConfigError, NotFoundError


def read_keys(path: str) -> list[str]:
    """Return the lines of a file that are not empty, or of standard input. Raises ConfigError, NotFoundError."""
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = raw.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {path} with keys") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder; give a file with keys, one a line") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the keys in {path} are not UTF-8 ({error}); keys are text, one a line") from error
    return [line.removesuffix("\r") for line in text.split("\n") if line.removesuffix("\r")]
