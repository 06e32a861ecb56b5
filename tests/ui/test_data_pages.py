"""The pages of a data set, its samples and one sample: their values are those of the command line."""

import datetime as dt
import html as html_module
import json
import re
import urllib.request
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import datasvc
from datasvc.repository import Repository
from datasvc.shards.format.schema import image_schema, shard_schema
from datasvc.ui.pages.histogram_charts import _conditions, _join
from tests.cli.command import run
from tests.samples import jpeg
from tests.shards.written_versions import TEXT_SCHEMA, write_version
from tests.ui.conftest import check_accessible, check_width, commands_of, running_ui, texts

PAGES = {
    "/datasets/pets@2": {"version", "versions", "bytes", "quarantine", "histogram label"},
    "/datasets/pets@2?split=val&where=label+%3D+1": {"histogram label", "histogram width / height"},
    "/datasets/pets@1": {"version"},
    "/datasets/pets@2/samples/train": {"samples"},
    "/datasets/pets@2/samples/train?where=label+%3E+1&order=key+desc&start=3&view=table": {"samples"},
    "/diff/pets@1/pets@2": {"difference"},
    "/diff/birds@1/pets@1": {"difference"},
    "/datasets/pets@prod/samples/val/7?models=1": {"sample", "models"},
}
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'; drop table samples --",
    "a\u202eb",
    "&lt;b&gt;",
]


@pytest.mark.parametrize("path", PAGES)
def test_each_panel_has_the_values_that_its_command_prints(ui, path):
    commands = commands_of(ui.get(path)[2])
    values = ui.json(path)
    assert PAGES[path] <= values.keys() - {"problems"} == commands.keys()
    for name in PAGES[path]:
        printed = run(*commands[name][1:])
        assert printed.returncode == 0, printed.stderr
        assert json.loads(printed.stdout) == values[name], name


def test_what_an_ingest_has_rejected_is_listed_with_its_reason(tmp_path):
    photos, repository = tmp_path / "photos", tmp_path / "repo"
    for number in range(4):
        path = photos / "cats" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg() if number else b"no image")
    datasvc.open(str(repository), create=True)
    words = ["--split", "train", "--on-bad", "skip", "--repo", repository]
    assert run("ingest", photos, "pets", *words).returncode == 6
    printed = json.loads(run("show", "pets@1", "--bad", "--json", "--repo", repository).stdout)
    ((key, reason),) = [(row["key"], row["reason"]) for row in printed]
    assert "0.jpg" in key
    with running_ui(repository) as server:
        assert server.json("/datasets/pets@1", "quarantine") == printed
        html = server.get("/datasets/pets@1")[2]
    assert '<a href="#quarantine">1 sample was rejected</a> by its ingest.' in html
    section = html.partition('<section aria-label="Quarantine" id="quarantine">')[2].partition("</section>")[0]
    (row,) = re.findall(r"<tr><td>.*?</tr>", section)
    assert [html_module.unescape(cell) for cell in re.findall(r"<td>(?:<code>)?(.*?)(?:</code>)?</td>", row)] == [
        "train", key, reason
    ]  # fmt: skip


def test_each_line_of_python_runs(ui, filled):
    lines = re.findall(
        r">import datasvc\n(datasvc\.open[^<]*)</pre>", ui.get("/datasets/pets@2/samples/train/3?models=1")[2]
    )
    lines += re.findall(r">import datasvc\n(datasvc\.open[^<]*)</pre>", ui.get("/datasets/pets@2")[2])
    assert len(lines) > 6
    for line in set(lines):
        assert eval(html_module.unescape(line), {"datasvc": datasvc}) is not None


def test_lists_are_sorted_by_their_heads_which_are_links(ui):
    path = "/?models_sort=step"
    for expected, order in ((["pets@2", "birds@1"], "descending"), (["birds@1", "pets@2"], "ascending")):
        (head,) = re.findall(r'href="([^"]*)#datasets">samples', ui.get(path)[2])
        path = html_module.unescape(head)
        html = ui.get(path)[2]
        assert re.findall(r'<th scope="row"><a href="/datasets/([^"]*)"', html) == expected
        assert f'aria-sort="{order}"><a href="/?' in html
        assert "models_sort=step" in path  # the order of the other table stays
    status, _, html = ui.get("/models?sort=colour")
    assert status == 400
    assert "expected one of" in html


def test_a_version_is_described_in_a_sentence_with_its_graph(ui):
    text = texts(ui.get("/datasets/pets@2")[2])
    assert "pets@2 has 118 samples in 2 splits" in " ".join(text.split())
    assert "pets@1" in text
    assert "all samples" in text


def test_a_version_is_compared_with_the_one_before_and_has_its_models(ui, monkeypatch):
    text = " ".join(texts(ui.get("/datasets/pets@2")[2]).split())
    assert "2 fewer than pets@1" in text
    # By model: a run may have saved hundreds of versions.
    assert "4 model versions were trained on it: 4 of cnn ." in text
    assert '4 of <a href="/models/cnn@4">cnn</a>' in ui.get("/datasets/pets@2")[2]
    assert "No model version was trained on it." in texts(ui.get("/datasets/birds")[2])
    monkeypatch.setattr("datasvc.ui.pages.dataset._MAX_MODEL_VERSIONS", 3)
    html = ui.get("/datasets/pets@2")[2]
    assert "trained on it:" not in texts(html)
    assert '<a href="/datasets/pets@2?models=1">Find the model versions' in html
    assert "4 model versions were trained on it" in texts(ui.get("/datasets/pets@2?models=1")[2])


def test_the_bar_of_a_class_leads_to_its_samples(ui):
    html = ui.get("/datasets/pets@2")[2]
    (link,) = set(re.findall(r'href="(/datasets/pets@2/samples/train\?where=label[^"]*1)"', html))
    page = ui.json(html_module.unescape(link), "samples")
    assert {sample["class"] for sample in page["samples"]} == {"class1"}


def test_a_bar_filters_all_histograms_and_is_marked_and_a_second_click_ends_it(ui):
    def bars(html, condition):
        return [
            html_module.unescape(href)
            for href, label in re.findall(
                r'<a href="(/datasets/pets@2\?[^"]*#distributions)" aria-label="([^"]*)"', html
            )
            if label.startswith(condition)
        ]

    html = ui.get("/datasets/pets@2")[2]
    assert "bar mark fill c1" not in html
    (select,) = bars(html, "class1:")
    chosen = select.partition("#")[0]
    assert parse_qs(urlsplit(chosen).query)["where"] == ["label = 1"]
    values = ui.json(chosen)
    counts = {name: sum(part["count"] for part in values[name]["bins"]) for name in values if "histogram" in name}
    assert len(counts) > 2
    assert len(set(counts.values())) == 1  # all of them count the samples of this class
    html = ui.get(chosen)[2]
    assert html.count("bar mark fill c1") == 1
    (end,) = bars(html, "class1:")
    assert end == "/datasets/pets@2?split=train#distributions"


@given(st.lists(st.sampled_from(["a = 1", "b >= 2 and b < 3", "(c = 1) and d", "x -- y"]), max_size=4))
def test_joined_conditions_are_taken_apart_again(conditions):
    assert _conditions(_join(conditions)) == conditions


def test_pages_of_samples_are_walked_by_links_alone(ui, filled):
    path, seen = "/datasets/pets@2/samples/train?where=label+%3C+3", []
    while path:
        seen += [sample["key"] for sample in ui.json(path, "samples")["samples"]]
        path = next(iter(re.findall(r'rel="next" href="([^"]*)"', ui.get(path)[2])), None)
        path = path and html_module.unescape(path)
    expected = [
        sample["key"] for sample in datasvc.open(str(filled)).dataset("pets@2")["train"] if sample["label"] < 3
    ]
    assert seen == expected


def test_a_key_is_looked_up_and_one_that_is_not_there_is_said(ui):
    key = ui.json("/datasets/pets@2/samples/train", "samples")["samples"][5]["key"]
    assert [
        each["number"] for each in ui.json(f"/datasets/pets@2/samples/train?key={key}", "samples")["samples"]
    ] == [5]
    status, _, html = ui.get("/datasets/pets@2/samples/train?key=no/such")
    assert status == 200
    assert "has no sample with the key" in html


def test_a_wrong_condition_is_a_message_above_the_box_that_keeps_it(ui):
    status, _, html = ui.get("/datasets/pets@2/samples/train?where=labl+%3D+1")
    assert status == 200
    assert "the columns are key, image, width, height, label" in html
    assert 'value="labl = 1"' in html or "Problem" in html


def test_thumbnails_are_jpegs_that_a_browser_keeps(ui):
    with urllib.request.urlopen(f"{ui.url}/datasets/pets@2/samples/train/3/image/image") as response:
        assert response.read(2) == b"\xff\xd8"
        assert response.headers["Content-Type"] == "image/jpeg"
        assert "immutable" in response.headers["Cache-Control"]
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    with urllib.request.urlopen(f"{ui.url}/datasets/pets@prod/samples/train/3/image/image") as response:
        assert response.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    "path",
    [
        "/datasets/nothing",
        "/datasets/pets@9",
        "/datasets/pets@2/samples/test",
        "/datasets/pets@2/samples/train/94",
        "/datasets/pets@2/samples/train/-1",
        "/datasets/pets@2/samples/train/0/image/label",
    ],
)
def test_what_does_not_exist_is_not_found(ui, path):
    assert ui.get(path)[0] == 404
    assert ui.get(f"/api{path}")[0] == 404


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A repository with hostile names, an image that is damaged, a removed version, and a split of texts."""
    repository = Repository.create(str(tmp_path_factory.mktemp("odd") / "repo"))
    samples = [
        {"key": name, "image": jpeg(seed=number), "width": 40, "height": 30, "label": number}
        for number, name in enumerate(HOSTILE)
    ]
    samples.append({"key": "damaged", "image": b"no image", "width": 1, "height": 1, "label": 0})
    write_version(
        repository, "odd", {"train": [samples, samples[:1]]}, image_schema(labelled=True), HOSTILE, message=HOSTILE[0]
    )
    write_version(repository, "texts", {"a b": [[{"key": name, "text": name} for name in HOSTILE]]}, TEXT_SCHEMA)
    for _ in range(2):
        write_version(repository, "gone", {"train": [samples[:1]]}, image_schema(labelled=True))
    datasvc.open(repository.url).datasets.remove(["gone@1"], message="wrong")
    with running_ui(repository.url, thumbnails=tmp_path_factory.mktemp("odd_thumbnails")) as server:
        yield server


def heads_of(html):
    """Return the links of the histograms in the heads of a table of samples, by the text of their bar."""
    heads = html.partition("<thead>")[2].partition("</thead>")[0]
    found = re.findall(r'<a href="([^"]*)" aria-label="([^"]*)"', heads)
    return {html_module.unescape(label): html_module.unescape(href) for href, label in found}


def test_a_bar_in_the_head_of_a_column_filters_the_table_and_a_second_click_ends_it(ui):
    path = "/datasets/pets@2/samples/train?view=table&order=key"
    heads = heads_of(ui.get(path)[2])
    assert heads["32 to 33: 94 samples"].endswith("?where=height+%3E%3D+32+and+height+%3C+33&order=key&view=table")
    chosen = heads["class1: 24 samples"]
    assert {sample["class"] for sample in ui.json(chosen, "samples")["samples"]} == {"class1"}
    html = ui.get(chosen)[2]
    # All heads count the samples of this class now; the bar is marked.
    assert {label.rpartition(": ")[2] for label in heads_of(html) if label.startswith("32 to 33")} == {"24 samples"}
    assert "class0: 0 samples" not in heads_of(html)
    assert html.count("bar mark fill c1") == 1
    assert heads_of(html)["class1: 24 samples"] == "/datasets/pets@2/samples/train?order=key&view=table"
    both = heads_of(html)["32 to 33: 24 samples"]
    assert len(ui.json(both, "samples")["samples"]) == 24
    # Forms and links keep the view.
    assert html.count('name="view" value="table"') == 2
    assert "As pictures" in html
    assert "As a table" in ui.get("/datasets/pets@2/samples/train")[2]


def test_the_heads_of_texts_have_the_most_frequent_values(odd):
    html = odd.get("/datasets/texts/samples/a%20b")[2]
    assert len(heads_of(html)) == len(HOSTILE)
    assert "The histograms count all samples" in html
    for text, href in heads_of(html).items():
        (sample,) = odd.json(href, "samples")["samples"]
        assert sample["key"] == text.rpartition(": ")[0] or "\\u202e" in text


def test_heads_read_few_shards_and_documents_have_none(tmp_path, monkeypatch):
    repository = Repository.create(str(tmp_path / "repo"))
    shards = [[{"key": f"{shard}/{row}", "text": f"{row % 2}"} for row in range(4)] for shard in range(6)]
    write_version(repository, "short", {"train": shards}, TEXT_SCHEMA)
    write_version(repository, "long", {"train": [[{"key": "a", "text": "x" * 5000}]]}, TEXT_SCHEMA)
    monkeypatch.setattr("datasvc.ui.pages.histogram_charts._MAX_READ_SAMPLES", 8)
    with running_ui(tmp_path / "repo") as server:
        html = server.get("/datasets/short/samples/train")[2]
        assert "The histograms count the samples of 2 of 6 shards" in texts(html)
        assert set(heads_of(html)) == {"0: 4 samples", "1: 4 samples"}
        assert not heads_of(server.get("/datasets/long/samples/train")[2])


def test_columns_without_a_histogram_do_not_fail_the_pages(tmp_path):
    repository = Repository.create(str(tmp_path / "repo"))
    values = {"order": pa.int64(), "took": pa.duration("s"), "bytes": pa.binary()}
    schema = shard_schema([pa.field("key", pa.string(), nullable=False), *map(pa.field, values, values.values())])
    sample = {"key": "a", "order": 7, "took": dt.timedelta(seconds=2), "bytes": b"\xff"}
    write_version(repository, "odd", {"train": [[sample]]}, schema)
    with running_ui(tmp_path / "repo") as server:
        status, _, html = server.get("/datasets/odd/samples/train")
        assert status == 200
        assert list(heads_of(html)) == ["7 to 8: 1 samples"]
        assert len(server.json(heads_of(html)["7 to 8: 1 samples"], "samples")["samples"]) == 1
        for path in ("/datasets/odd/samples/train", "/datasets/odd"):
            assert not server.json(path)["problems"]


def test_a_sample_has_its_duplicate(odd):
    found = odd.json("/datasets/odd/samples/train/0", "sample")
    assert found["duplicates"]["samples"] == [{"split": "train", "number": 6, "key": HOSTILE[0]}]


def test_a_damaged_image_is_a_picture_that_says_so(odd):
    with urllib.request.urlopen(f"{odd.url}/datasets/odd/samples/train/5/image/image") as response:
        assert response.read(2) == b"\xff\xd8"


def test_a_removed_version_says_when_and_why(odd):
    html = odd.get("/datasets/gone@1")[2]
    assert "was removed" in html
    assert "wrong" in html


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A repository whose second version adds, deletes and changes samples, a class, a column and a split."""
    repository = Repository.create(str(tmp_path_factory.mktemp("changed") / "repo"))

    def sample(key, seed, label=0, **more):
        return {"key": key, "image": jpeg(seed=seed), "width": 40, "height": 30, "label": label, **more}

    old = [sample(key, seed) for seed, key in enumerate("abcd")]
    new = [sample("a", 9), old[1], sample("c", 2, label=1), sample("e<b>", 5, label=1)]
    schema = image_schema(labelled=True)
    write_version(repository, "pets", {"train": [old], "val": [old[:1]]}, schema, ("cat",))
    wide = schema.append(pa.field("score", pa.float64()))
    write_version(repository, "pets", {"train": [[{**each, "score": 1.5} for each in new]]}, wide, ("cat", "<i>dog"))
    with running_ui(repository.url, thumbnails=tmp_path_factory.mktemp("changed_thumbnails")) as server:
        yield server


def test_a_comparison_shows_samples_drift_and_columns(changed):
    html = changed.get("/diff/pets@1/pets@2")[2]
    text = " ".join(texts(html).split())
    assert "From pets@1 to pets@2: 1 sample added, 2 samples deleted" in text
    assert "columns added score: double" in text
    assert "classes added &lt;i&gt;dog" in text
    assert "Drift of classes" in text
    assert "e&lt;b&gt;" in html
    assert "<b>" not in html
    for path in set(re.findall(r'<img src="([^"]*)"', html)):
        with urllib.request.urlopen(changed.url + path) as response:
            assert response.read(2) == b"\xff\xd8"


def test_a_comparison_links_its_classes_and_offers_no_more_than_there_is(changed, ui):
    html = changed.get("/diff/pets@1/pets@2")[2]
    assert 'href="/datasets/pets@2/samples/train?where=label+%3D+0">cat</a>' in html
    assert "Show more samples" not in html
    assert "Show more samples" in changed.get("/diff/pets@1/pets@2?n=1")[2]
    text = " ".join(texts(ui.get("/diff/pets@1/pets@2")[2]).split())
    assert "val No changes." in text
    assert re.search(r"train 0 2 0 94 \d+\.\d %", text)


def test_what_all_samples_share_is_a_sentence_and_few_classes_have_no_table(ui):
    html = ui.get("/datasets/pets@2")[2]
    text = " ".join(texts(html).split())
    assert "width: 32 in all samples." in text
    assert 'aria-label="Histogram of width"' not in html
    assert "Classes of train" not in text
    assert "Classes of train" in ui.get("/datasets/pets@2?class=1")[2]
    assert "Bytes that versions share" in text
    assert "Bytes that versions share" not in ui.get("/datasets/birds@1")[2]


def test_a_sample_has_its_size_in_bytes_and_its_class_in_words(ui):
    text = " ".join(texts(ui.get("/datasets/pets@2/samples/train/3")[2]).split())
    assert re.search(r"image [\d,]+ bytes", text)
    assert "class class" in " ".join(texts(ui.get("/datasets/pets@2/samples/train")[2]).split())


def test_numbers_of_samples_say_that_they_count_from_zero(ui):
    first = " ".join(texts(ui.get("/datasets/birds@1/samples/train/0")[2]).split())
    assert "Sample number 0 in birds@1 train , whose 12 samples count from 0; class" in first
    page = " ".join(texts(ui.get("/datasets/birds@1/samples/train")[2]).split())
    assert "12 samples; numbers 0 to 11 are shown." in page


def test_a_comparison_that_is_too_large_for_a_page_has_the_command(changed, monkeypatch):
    monkeypatch.setattr("datasvc.ui.pages.diff._MAX_UNSHARED", 3)
    html = changed.get("/diff/pets@1/pets@2")[2]
    assert "too many for a page; run datasvc diff pets@1 pets@2" in html


BROWSER_PATHS = [
    "/diff/pets@1/pets@2",
    "/diff/birds@1/pets@2",
    "/datasets/pets@2",
    "/datasets/pets@2/samples/train?where=label+%3C+2&view=table",
    "/datasets/pets@2/samples/train/3",
]


@pytest.mark.parametrize("path", BROWSER_PATHS)
def test_the_pages_are_accessible_and_fit_a_narrow_window(ui, page, path):
    page.goto(ui.url + path)
    check_accessible(page)
    check_width(page)


def test_a_person_goes_from_a_class_to_a_sample_and_its_models(ui, page):
    page.goto(f"{ui.url}/datasets/pets@2")
    page.get_by_role("region", name="Histogram of label").locator("..").get_by_text("As a table").click()
    page.get_by_role("table", name="label, all samples").get_by_role("link").nth(1).click()
    page.wait_for_url("**/samples/train?where=label*")
    page.wait_for_function("document.querySelector('.grid img')?.naturalWidth > 0")  # 0 until it has arrived
    page.get_by_label("Sort by").fill("key desc")
    page.get_by_label("Sort by").press("Enter")
    page.wait_for_url("**order=key*")
    page.locator(".grid a").first.click()
    page.get_by_role("heading", name="Models trained on it").wait_for()
    page.locator("#models table, #models p:has-text('No model version')").wait_for()


def test_the_pages_work_without_javascript(ui, browser):
    context = browser.new_context(java_script_enabled=False)
    window = context.new_page()
    window.goto(f"{ui.url}/datasets/pets@2")
    window.get_by_label("Where (SQL)").fill("label = 2")
    window.get_by_role("button", name="Show").click()
    window.get_by_role("link", name="Show these samples").click()
    window.locator(".grid a").first.click()
    window.get_by_role("link", name="Find the model versions").click()
    assert window.get_by_role("heading", name="Models trained on it").is_visible()
    context.close()
