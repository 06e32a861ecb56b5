"""Budgets as people write them: a size such as "50GB", or "10%" of the disk."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from datasvc.errors import ConfigError
from datasvc.sizes import parse_size


def parse_budget(text: str, folder: Path) -> int:
    """Return the bytes of a budget for a cache at `folder`: a size, or a share of its disk such as "10%".

    Raises:
        ConfigError: not a size, not above zero, or more than the disk has.
    """
    percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if percent:
        if float(percent[1]) > 100:
            raise ConfigError(f"a cache budget of {text!r} is more than the disk has")
        existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
        budget = int(shutil.disk_usage(existing).total * float(percent[1]) / 100)
    else:
        try:
            budget = parse_size(text)
        except OverflowError as error:
            raise ConfigError(f"a cache budget of {text[:20]!r}... is more than any disk has") from error
    if budget <= 0:
        raise ConfigError(f"a cache budget of {text!r} holds nothing; expected more than 0 bytes")
    return budget
