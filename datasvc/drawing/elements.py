"""Builds elements of HTML and SVG. Owns the escaping: text becomes markup here and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Final

from datasvc.drawing.colours import style_sheet
from datasvc.printable import escape_controls

# Longer texts are cut, so that a hostile name cannot make a page of megabytes. Drawings cut visible labels earlier.
_MAX_TEXT: Final = 2000
_VOID: Final = frozenset({"br", "img", "hr", "input", "meta"})
# A link may be relative or of the web. `javascript:` and `data:` would execute what a name contains.
_SCHEME: Final = re.compile(r"\s*([a-z][a-z0-9+.-]*):", re.IGNORECASE)
_SAFE_SCHEMES: Final = frozenset({"http", "https"})
_NARROW: Final = frozenset("iljtfrI.,:;'|!()[]/ -")
_NARROWEST: Final = 0.4
# Pictures that this package encodes itself are the only data in an `src`.
_IMAGE: Final = re.compile(r"data:image/(png|jpeg|webp);base64,[A-Za-z0-9+/=]*")


class Markup(str):
    """Text that is markup already: `element` escapes every other text, and Jinja2 escapes no text with `__html__`."""

    __slots__ = ()

    def __html__(self) -> str:
        return str(self)


def markup(parts: Iterable[str]) -> Markup:
    """Return parts as one markup; what is not `Markup` is escaped."""
    return Markup("".join(map(_content, parts)))


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    r"""Return an element as text.

    Args:
        tag: its name, such as "rect".
        *children: `Markup`, or text, which is escaped. Characters that are not printable are shown as in `\n`.
        **attributes: values by name. `class_` is `class`, and an underscore is a hyphen: `font_size`, `aria_label`.
            None leaves an attribute out, and numbers are rounded to 2 digits after the point.
    """
    texts = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_attribute(name, value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{texts}/>")
    return Markup(f"<{tag}{texts}>{markup(children)}</{tag}>")


def svg(
    *children: str, width: float, height: float, title: str, description: str = "", interactive: bool = False
) -> Markup:
    """Return an `svg` element of a size in pixels.

    Args:
        *children: its content.
        width: pixels.
        height: pixels.
        title: what it shows; screen readers read it.
        description: the same in a sentence with the main values.
        interactive: whether it contains links. Screen readers skip the links of an image, so it is a group then.
    """
    return element(
        "svg",
        element("title", title),
        *([element("desc", description)] if description else []),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        class_="drawing",
        role="group" if interactive else "img",
        aria_label=title,
        viewBox=f"0 0 {number_text(width)} {number_text(height)}",
        width=width,
        height=height,
        font_size=12,
        font_family="system-ui, sans-serif",
    )


def link(text: str, href: str | None, *, title: str = "") -> Markup:
    """Return text or markup as a link; without an address, or with one that is no web address, without a link.

    Args:
        text: what is shown; in an SVG, the elements that are clicked.
        href: a relative address, or one of http or https.
        title: name for screen readers and on hover, where `text` is no text.
    """
    if href is None or not is_safe_address(href):
        return markup([text])
    return element("a", text, href=href, aria_label=title or None)


def is_safe_address(href: str) -> bool:
    """Return whether a link may lead to an address: a relative one, or one of http or https."""
    scheme = _SCHEME.match(escape_controls(href))
    return scheme is None or scheme[1].lower() in _SAFE_SCHEMES


def shorten(text: str, max_characters: int) -> str:
    """Return printable text of at most `max_characters`; the middle of a longer one is replaced by "…"."""
    # Cut first: escaping is slow on a megabyte, and makes text only longer.
    shown = escape_controls(_cut(text, max_characters + 1))
    return _cut(shown, max_characters)


def text_width(text: str, font_size: float = 12, *, is_bold: bool = False) -> float:
    """Return about how many pixels a text takes in a wide system font; in other fonts it takes fewer."""
    ems = sum(_character_width(character) for character in text)
    return font_size * ems * (1.12 if is_bold else 1)


def shorten_to_width(text: str, width: float, font_size: float = 12, *, is_bold: bool = False) -> str:
    """Return printable text that takes at most `width` pixels; the middle of a longer one is replaced by "…"."""
    shown = shorten(text, max(int(width / (_NARROWEST * font_size)), 1))
    while len(shown) > 1 and (needed := text_width(shown, font_size, is_bold=is_bold)) > width:
        shown = shorten(text, max(min(int(len(shown) * width / needed), len(shown) - 1), 1))
    return shown


def _character_width(character: str) -> float:
    """Return the width of a character in the font DejaVu Sans, about, as a share of the font size."""
    if character in _NARROW:
        return _NARROWEST
    if not character.isascii() or character in "mwMW@%":
        return 1.0
    return 0.74 if character.isupper() else 0.64


def _cut(text: str, max_characters: int) -> str:
    if len(text) <= max_characters:
        return text
    end = (max_characters - 1) // 2
    return f"{text[: max_characters - 1 - end]}…{text[len(text) - end :]}"


def standalone(*parts: Markup) -> Markup:
    """Return drawings with their style sheet, for a file or a notebook: light and dark as the system is set.

    Args:
        *parts: what functions of this package returned. A single SVG stays one, so that it can be a file; else the
            result is HTML.
    """
    style, drawing = Markup(f"<style>{style_sheet()}</style>"), markup(parts)
    if not (drawing.startswith("<svg") and drawing.endswith("</svg>") and drawing.count("<svg") == 1):
        return element("div", style, drawing, class_="drawing")
    end = drawing.index(">") + 1
    return Markup(f"{drawing[:end]}{style}{drawing[end:]}")


def number_text(number: float) -> str:
    """Return a coordinate with at most 2 digits after the point."""
    return f"{number:.2f}".rstrip("0").rstrip(".") if isinstance(number, float) else str(number)


def _content(text: str) -> str:
    return text if isinstance(text, Markup) else escape(shorten(text, _MAX_TEXT))


def _attribute(name: str, value: str | float) -> str:
    if not isinstance(value, str):
        return number_text(value)
    if name == "src":
        # Checked here, not shortened: the bytes of a thumbnail are longer than a text.
        assert _IMAGE.fullmatch(value) or is_safe_address(value)
        return escape(value)
    if name == "href":
        assert is_safe_address(value)
        return escape(escape_controls(value))
    # The data of a path consists of numbers alone, and may be long.
    return escape(value if name in {"d", "points"} else shorten(value, _MAX_TEXT))
