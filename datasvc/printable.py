"""Text for people: printable lines, in which no text can execute an escape sequence, and numbers with their nouns."""

from __future__ import annotations


def escape_controls(text: str) -> str:
    r"""Return `text` with each character that is not printable, such as a line break, escaped as in `\n`."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def count_text(count: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: `1 shard`, `2 shards`. The plural `many` is by default `one` with an "s"."""
    return f"{count} {one if count == 1 else many or one + 's'}"
