"""What people look for on the pages: a class, a picture in its size, the rows that they see as a file."""

import csv
import io
import urllib.request
from html.parser import HTMLParser

import pytest
from PIL import Image

from tests.ui.conftest import browser, filled, page, texts, ui  # noqa: F401 - fixtures

PETS = "/datasets/pets@2/samples/train"


class Links(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.found = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):  # noqa: ARG002
        self.found += [value for name, value in attributes if name == "href"]


def classes_of(ui, address):  # noqa: F811
    return [sample["class"] for sample in ui.json(address, "samples")["samples"]]


@pytest.mark.slow
def test_a_class_is_one_click_away_wherever_it_stands(ui):  # noqa: F811
    """ultralytics/hub#7: to see the second class, people scrolled through the first."""
    for address in (PETS, f"{PETS}/3", f"{PETS}?view=table", "/datasets/pets@2"):
        links = {link for link in Links(ui.get(address)[2]).found if "where=label+%3D+" in link and PETS in link}
        assert links, address
        for link in links:
            assert len(set(classes_of(ui, link))) == 1


@pytest.mark.parametrize(
    ("text", "classes"), [("class2", {"class2"}), ("CLASS1", {"class1"}), ("it's", set()), ("zzz", set())]
)
def test_a_part_of_a_key_or_class_finds_its_samples(ui, text, classes):  # noqa: F811
    """doccano/doccano#1941: the search took whole keys only."""
    found = ui.json(f"{PETS}?find={urllib.request.quote(text)}")
    assert found["problems"] == []
    assert {sample["class"] for sample in found["samples"]["samples"]} == classes


def test_a_search_narrows_the_filter_that_is_there(ui):  # noqa: F811
    """The neighbour of the fault above: a search that forgets the filter."""
    number = ui.json(f"{PETS}?find=class2&where=width+%3C+1", "samples")
    assert number["samples"] == []


def test_the_csv_has_the_rows_of_the_filter_from_all_pages(filled, ui):  # noqa: F811
    """esvit/ng-table-export#17, TablePlus/TablePlus#560: a file with all rows, or with those of one page."""
    status, headers, text = ui.get(f"{PETS}?where=label+%3C+3&order=key+desc&format=csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert (status, headers["Content-Type"].partition(";")[0]) == (200, "text/csv")
    expected = ui.json(f"{PETS}?where=label+%3C+3&order=key+desc", "samples")["samples"]
    assert [row["key"] for row in rows] == [sample["key"] for sample in expected]
    assert rows[0]["class"] == expected[0]["class"]
    assert int(rows[0]["image"]) == expected[0]["values"]["image"]["bytes"]


def test_the_csv_of_a_wrong_filter_has_no_rows(ui):  # noqa: F811
    assert "text/html" in ui.get(f"{PETS}?where=labl+%3D+1&format=csv")[1]["Content-Type"]


def test_a_picture_is_shown_in_its_size(ui):  # noqa: F811
    """A thumbnail does not show what a label is about."""
    link = next(link for link in Links(ui.get(f"{PETS}/3")[2]).found if link.endswith("full=1"))
    with urllib.request.urlopen(ui.url + link) as response:
        assert response.headers["Content-Type"] == "image/jpeg"
        assert Image.open(io.BytesIO(response.read())).size == (32, 32)
        assert response.headers["Cache-Control"] == "no-store"  # a purge may remove it


def test_the_page_of_a_data_set_begins_with_some_of_its_samples(ui):  # noqa: F811
    """Distributions of labels say little about what is in the pictures."""
    html = ui.get("/datasets/pets@2")[2]
    assert 0 < html.index("/image/image") < html.index('id="distributions"')


def test_both_versions_of_a_comparison_are_on_a_telephone(ui, page):  # noqa: F811
    """At 400 pixels, the second version was outside of the window, and names broke in the middle of a word."""
    page.set_viewport_size({"width": 400, "height": 800})
    page.goto(f"{ui.url}/compare/cnn@1/cnn@3")
    heads = page.locator("table.both thead th")
    boxes = [heads.nth(number).bounding_box() for number in range(4)]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 400 for box in boxes)
    lines = page.evaluate("""[...document.querySelectorAll('table.both code')].flatMap((name) =>
        [...name.childNodes].filter((part) => part.nodeType === 3).map((part) => {
            const range = document.createRange();
            range.selectNodeContents(part);
            return new Set([...range.getClientRects()].map((box) => box.top)).size;
        }))""")
    assert set(lines) == {1}
