"""Texts that try to leave the place where a drawing puts them."""

from xml.etree import ElementTree as ET

from hypothesis import strategies as st

HOSTILE = [
    "<script>alert(1)</script>",
    "</title></svg><img src=x onerror=alert(1)>",
    "\"' onload='alert(1)",
    "]]><!--",
    "&lt;script&gt; &#60; &",
    "\x00\x1b[31m\x7f\r\n\t",
    "\u202eevil\u2066",
    "\ud800",
    "\ufffe\uffff",
    "javascript:alert(1)",
    "x" * 10_000,
    "{{ 7 * 7 }}",
    "",
]
texts = st.sampled_from(HOSTILE) | st.text(max_size=30)
ALLOWED = {
    *("svg", "title", "desc", "g", "a", "path", "line", "circle", "rect", "polygon", "text", "style", "div", "img"),
    *(
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "figure",
        "figcaption",
        "p",
        "details",
        "summary",
        "h3",
    ),
}


def parsed(markup: str) -> ET.Element:
    """Return the root element of a fragment, which is XML with elements and attributes of drawings only."""
    root = ET.fromstring(markup)
    for each in root.iter():
        tag = local_name(each)
        assert tag in ALLOWED, tag
        assert not {name for name in each.attrib if name.startswith("on") or name == "style"}
        assert not each.get("href", "").lower().lstrip().startswith(("javascript:", "data:"))
    return root


def local_name(element: ET.Element) -> str:
    return element.tag.rpartition("}")[2]


def with_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [each for each in root.iter() if name in each.get("class", "").split()]


def text_of(root: ET.Element) -> str:
    return " ".join(" ".join(root.itertext()).split())
