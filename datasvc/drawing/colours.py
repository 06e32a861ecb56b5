"""Colours: the palette of Okabe and Ito in a fixed order, as CSS classes with values for light and dark backgrounds.

A mark has a class for what is coloured (`fill` or `line`) and one for the colour: `c0` to `c7` for things, which keep
their colour on every page, and `accent`, `grey`, `problem` and `back` (the background) by meaning.

See Okabe and Ito, "Color Universal Design", 2008.
"""

from __future__ import annotations

from typing import Final

# Light and dark background: the palette has black, which is white on black, and its dark blue is brighter there.
_PALETTE: Final = (
    ("#0072b2", "#56a8de"),  # blue
    ("#e69f00", "#e69f00"),  # orange
    ("#009e73", "#1fb68c"),  # bluish green
    ("#cc79a7", "#d68fb6"),  # reddish purple
    ("#56b4e9", "#8ccdf2"),  # sky blue
    ("#d55e00", "#e87a2c"),  # vermillion
    ("#000000", "#ffffff"),  # black
    ("#f0e442", "#f0e442"),  # yellow: hardly visible on white, so it comes last
)
# The same kind of thing has the same colour on every page.
_KINDS: Final = {"source": "c1", "shards": "c4", "data version": "c0", "run": "c3", "model": "c2", "sample": "c5"}
NUM_COLOURS: Final = len(_PALETTE)
_COLOURS: Final = {f"c{number}": pair for number, pair in enumerate(_PALETTE)} | {
    "accent": ("#0072b2", "#56a8de"),
    "grey": ("#6e7781", "#8b949e"),
    "pale": ("#d0d7de", "#3d444d"),  # grid lines and frames
    "problem": ("#b3261e", "#ff8a80"),
    "back": ("#ffffff", "#16191d"),
    "ink": ("#1f2328", "#e6edf3"),
}


def colour_class(number: int) -> str:
    """Return the class of series `number`; after the last colour the first follows."""
    return f"c{number % NUM_COLOURS}"


def kind_colour(kind: str) -> str:
    """Return the class of a kind of thing, such as "data version"; grey for a kind that has no colour."""
    return _KINDS.get(kind, "grey")


def colour_values(name: str) -> tuple[str, str]:
    """Return the value of a colour, such as "#0072b2", on a light and on a dark background."""
    return _COLOURS[name]


def style_sheet(scope: str = ".drawing") -> str:
    """Return the CSS of all drawings, for light and dark as the system is set.

    Args:
        scope: selector of the drawings. Rules without it would colour the page around a drawing.
    """
    dark = _rules(scope, 1)
    return (
        f"{_rules(scope, 0)}\n{_SHAPES.replace('SCOPE', scope)}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"
    )


def _rules(scope: str, column: int) -> str:
    ink, back = _COLOURS["ink"][column], _COLOURS["back"][column]
    rules = [
        f"{scope} {{ color: {ink}; background: {back}; }}",
        # The name of what an element leads to looks like a link of the page.
        f"{scope} a text.name {{ fill: {_COLOURS['accent'][column]}; text-decoration: underline; }}",
    ]
    for name, values in _COLOURS.items():
        rules.append(f"{scope} .fill.{name} {{ fill: {values[column]}; }}")
        rules.append(f"{scope} .line.{name} {{ stroke: {values[column]}; }}")
    return "\n".join(rules)


_SHAPES: Final = """
SCOPE text { fill: currentColor; }
SCOPE text.quiet { fill: currentColor; opacity: 0.75; }
SCOPE .line { fill: none; }
SCOPE a { color: inherit; }
SCOPE a:hover .mark, SCOPE a:focus .mark { stroke: currentColor; stroke-width: 2; }
SCOPE table { border-collapse: collapse; font: inherit; font-variant-numeric: tabular-nums; margin: 4px 0; }
SCOPE th, SCOPE td { padding: 2px 8px; text-align: left; vertical-align: top; }
SCOPE .number { text-align: right; }
SCOPE figure { display: inline-block; margin: 4px; text-align: center; vertical-align: top; }
SCOPE figure img { width: 96px; height: 96px; object-fit: contain; }
SCOPE figure.bad { outline: 2px solid #b3261e; }
SCOPE figcaption { max-width: 96px; overflow-wrap: anywhere; font-size: 12px; }
""".strip()
