"""Short texts of sample values. Blobs are represented by their sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from datasvc.printable import escape_controls, json_value

_SHOWN_ITEMS: Final = 8


def short_text_value(value: Any) -> str:
    """Return a sample's value as one line of text as `text_value` does, with only the first values of long lists."""
    return escape_controls(_shortened(value))


def _shortened(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        shown = ", ".join(map(_shortened, value[:_SHOWN_ITEMS]))
        return f"[{shown}, ... {len(value)} values]" if len(value) > _SHOWN_ITEMS else f"[{shown}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(name))}: {_shortened(item)}" for name, item in value.items()) + "}"
    plain = json_value(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
