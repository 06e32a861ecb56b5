import re

import pytest
from hypothesis import given

from datasvc.drawing import Markup, element, html_table, link, standalone, style_sheet
from datasvc.drawing.colours import colour_values
from datasvc.drawing.elements import shorten, svg
from tests.drawing.hostile import HOSTILE, parsed, text_of, texts


@given(texts, texts)
def test_text_and_attributes_stay_text(text, attribute):
    root = parsed(element("text", text, aria_label=attribute))
    assert len(root) == 0
    assert set(root.attrib) == {"aria-label"}
    if text.isprintable() and len(text) < 100:
        assert (root.text or "") == text


def test_markup_is_not_escaped_again_and_numbers_are_short():
    inside = element("text", "a & b", x=1 / 3, y=2, class_=None)
    assert inside == '<text x="0.33" y="2">a &amp; b</text>'
    assert element("g", inside, "<") == f"<g>{inside}&lt;</g>"
    assert Markup("<b>").__html__() == "<b>"


@pytest.mark.parametrize(
    "href", ["javascript:alert(1)", " JaVaScRiPt:x", "data:text/html,x", "vbscript:x", "file:///x"]
)
def test_a_link_to_what_a_browser_would_execute_is_text(href):
    assert link("x", href) == "x"


@pytest.mark.parametrize(
    "href", ["/data/pets@3", "?where=a:b", "#x", "https://example.org/a?b=1&c=2", "pets", "java\tscript:x"]
)
def test_an_address_of_the_web_is_a_link(href):
    assert parsed(link("x", href)).get("href") == href.replace("\t", "\\t")


def test_long_text_is_cut_in_its_middle():
    assert shorten("abcdefghij", 5) == "ab…ij"
    assert shorten("abc", 3) == "abc"
    assert len(shorten("\x00" * 10**6, 40)) == 40


def test_a_standalone_drawing_brings_its_colours_for_light_and_dark():
    for drawing in (svg(width=1, height=1, title="<x>"), html_table(["a"], [[1]])):
        text = standalone(drawing)
        assert style_sheet() in text
        assert "prefers-color-scheme: dark" in text
        parsed(text)


def test_text_and_problems_have_the_contrast_of_wcag_aa_on_both_backgrounds():
    for column in (0, 1):
        back = luminance(colour_values("back")[column])
        for name in ("ink", "grey", "problem", "accent"):
            low, high = sorted((back, luminance(colour_values(name)[column])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, name


def luminance(colour):
    parts = [int(part, 16) / 255 for part in re.findall("[0-9a-f]{2}", colour)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_table_aligns_numbers_and_names_what_it_leaves_out():
    root = parsed(html_table(["name", "n"], [["a", 1200], ["b", None], ["c", 3]], caption="<t>", max_rows=2))
    assert text_of(root) == "<t> name n a 1,200 b and 1 more"
    assert [each.get("class") for each in root.iter("td")] == [None, "number", None, "number", None]


@given(texts)
def test_a_table_shows_hostile_text_as_text(text):
    assert len(list(parsed(html_table([text], [[text]], caption="t")).iter())) == 8


def test_each_hostile_text_is_shortened_to_a_printable_one():
    assert all(shorten(text, 40).isprintable() for text in HOSTILE)
