"""Text of users and stores on a terminal: one printable line, so that no text can execute an escape sequence."""

from __future__ import annotations


def escape_controls(text: str) -> str:
    r"""Return `text` with each character that is not printable, such as a line break, escaped as in `\n`."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
