"""Pages about which samples are trained on: changed labels, views, purges, signals, replayed batches, overlaps."""

import html as html_module
import json
import re
import urllib.request

import numpy as np
import pytest
from PIL import Image

import datasvc
from datasvc.ledger.masked import Masked
from datasvc.loaders import ImageLoader
from datasvc.models import ConsumptionTracker
from datasvc.runs import RunLog
from datasvc.views import replayed
from datasvc.views.loading import to_levels
from datasvc.views.models import describe
from datasvc.views.view import fact_texts
from tests.cli.command import run as run_command
from tests.samples import write_folder
from tests.ui.conftest import check_accessible, check_width, commands_of, running_ui, texts

RUN = "20261123-221830-3fa9c1"
KEYS = [f"{'cat' if number < 12 else 'dog'}/{number:05d}.jpg" for number in range(24)]


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """`pets`: two classes, whose second version has three other labels; and a run with signals and two versions."""
    folder = tmp_path_factory.mktemp("which")
    photos = write_folder(folder / "photos", {"train": {"cat": 12, "dog": 12}, "val": {"cat": 1}})
    (photos / "val" / "cat" / "copy.jpg").write_bytes((photos / "train" / "cat" / "00000.jpg").read_bytes())
    repo = datasvc.open(str(folder / "repo"), create=True)
    repo.datasets.ingest(str(photos), "pets", on_split_overlap="keep")
    (folder / "labels.csv").write_text("key,label\ncat/00001.jpg,dog\ncat/00002.jpg,dog\ndog/00015.jpg,cat\n")
    repo.datasets.columns.set("pets", "label", folder / "labels.csv")
    train(repo)
    split = repo.dataset("pets@1")["train"]
    repo.datasets.save_view("dogs", split.where("class = 'dog'"), message="half")
    repo.datasets.save_view("even", split.where("class = 'dog'").balanced())
    return repo


def train(repo):
    """Take six steps of eight samples, and record for each sample a loss that depends on its key."""
    split = repo.dataset("pets@1")["train"]
    loader = ImageLoader(split, batch_size=8, training=True, seed=0, decode="cpu", size=32)
    with RunLog.open(repo.repository, "cnn", run_id=RUN, data=["pets@1"]) as log, loader:
        repo.runs.record(log.ref, loader)
        tracker = ConsumptionTracker(loader)
        stream = iter(loader)
        for step in range(1, 7):
            batch = next(stream, None)
            if batch is None:
                stream = iter(loader)
                batch = next(stream)
            loader.record(batch, np.array([loss_of(key, batch.epoch) for key in batch.keys], np.float32))
            if step % 3 == 0:
                repo.models.save("cnn", {"w": np.zeros(2)}, step=step, data=[tracker.use()], run=log.ref)


def loss_of(key, epoch):
    return int(key[4:9]) + 100 * epoch


@pytest.fixture(scope="module")
def server(repo, tmp_path_factory):
    with running_ui(repo.repository.url, thumbnails=tmp_path_factory.mktemp("thumbnails")) as server:
        yield server


@pytest.fixture(scope="module")
def purged(tmp_path_factory):
    """`pets@1` without two of its samples, of which a model was trained on one; and the pages of it."""
    folder = tmp_path_factory.mktemp("purged")
    repo = datasvc.open(str(folder / "repo"), create=True)
    photos = write_folder(folder / "photos", {"train": {"cat": 12, "dog": 12}})
    repo.datasets.ingest(str(photos), "pets")
    train(repo)
    repo.datasets.export("pets", str(folder / "<exported>"), "folder")
    with running_ui(folder / "repo", thumbnails=folder / "thumbnails") as server:
        server.get("/datasets/pets@1/samples/train")  # it keeps what it has read
        repo.datasets.purge("pets", keys=KEYS[2:4], by="DPO <b>", message="request 7", dry_run=False)
        yield repo, server


def words(html):
    return " ".join(html_module.unescape(texts(html)).split())


def part(html, start, end="</section>"):
    """Return the part of a page from one text to another."""
    assert start in html
    return html.partition(start)[2].partition(end)[0]


def test_a_comparison_counts_the_changed_labels_and_shows_their_samples_with_both_classes(server):
    html = server.get("/diff/pets@1/pets@2")[2]
    assert "3 samples relabelled" in words(html)
    section = part(html, "<h3>Changed labels: 3 samples</h3>", "</ul>")
    rows = re.findall(r"<tr><th scope=\"row.*?</tr>", section)
    assert [words(row) for row in rows] == ["cat dog 2", "dog cat 1"]
    cells = re.findall("<li>.*?</li>", section, re.DOTALL)
    assert sorted(map(words, cells)) == [
        "cat/00001.jpg was cat , class dog", "cat/00002.jpg was cat , class dog", "dog/00015.jpg was dog , class cat",
    ]  # fmt: skip
    pairs = server.json("/diff/pets@1/pets@2", "difference")["splits"]["train"]["confusion"]
    assert pairs == [{"old": "cat", "new": "dog", "samples": 2}, {"old": "dog", "new": "cat", "samples": 1}]
    few = part(server.get("/diff/pets@1/pets@2?n=1")[2], "<h3>Changed labels: 3 samples</h3>", "</ul>")
    assert few.count("<li>") == 1
    assert few.count('<tr><th scope="row') == 2


def test_a_signal_is_shown_by_its_last_epoch_and_the_samples_with_the_largest_values(server):
    run = f"/runs/cnn/{RUN}"
    assert f'<a href="{run}/signals/loss">loss</a>' in part(server.get(run)[2], '<section aria-label="Signals">')
    html = server.get(f"{run}/signals/loss?n=3")[2]
    assert re.search("epoch 1,.* 24 values of the 24 samples of pets@1/train", words(html))
    cells = re.findall("<li>.*?</li>", part(html, '<section aria-label="Largest values">'), re.DOTALL)
    assert [words(cell) for cell in cells] == [
        f"{KEYS[number]} loss {loss_of(KEYS[number], 1)} , class dog" for number in (23, 22, 21)
    ]
    for picture in re.findall(r'<img src="([^"]*)"', html):
        assert server.get(picture)[1]["Content-Type"] == "image/jpeg"
    found = server.json(f"{run}/signals/loss", "signal")
    assert sum(each["num_values"] for each in found["bins"]) == found["num_values"] == 24
    assert found["bins"][0]["start"] == 100
    assert [each["value"] for each in found["largest"]] == [*range(123, 99, -1)]
    printed = run_command(*commands_of(html)["signal"][1:])
    assert json.loads(printed.stdout) == server.json(f"{run}/signals/loss?n=3", "signal")


def test_a_signal_that_is_too_large_for_a_page_or_of_another_split_is_refused(server, monkeypatch):
    assert server.get(f"/runs/cnn/{RUN}/signals/loss?data=pets@2/train")[0] == 404
    assert server.get(f"/runs/cnn/{RUN}/signals/accuracy")[0] == 404
    monkeypatch.setattr("datasvc.ui.pages.sample_records.signals._MAX_VALUES", 23)
    status, _, html = server.get(f"/runs/cnn/{RUN}/signals/loss")
    assert status == 400
    assert "more than 23 values" in html


def test_a_purge_is_listed_and_its_certificate_says_who_removed_what_and_what_was_proven(purged):
    repo, server = purged
    html = server.get("/datasets/pets@1")[2]
    assert "2 samples that were purged" in words(html)
    (link,) = re.findall(r'href="(/datasets/pets/certificates/[^"]*)"', html)
    page = server.get(link)[2]
    for fact in ("2 samples of pets", "DPO <b>", "request 7"):
        assert fact in words(page)
    assert "The proof is complete" in page
    (copy,) = repo.datasets.copies("pets")
    section = part(page, "<h3>Recorded copies, of which nothing is promised: 1</h3>", "</ul>")
    assert words(section) == f"pets@1 to {copy.destination}, export of {copy.created[:10]} by {copy.by}"
    assert [words(row) for row in re.findall('<tr><th scope="row"><code>.*?</tr>', page)] == KEYS[2:4]
    assert {"pets@1 2", "cnn@1 2", "cnn@2 2"} <= {words(row) for row in re.findall(r"<tr><th .*?</tr>", page)}
    (certificate,) = repo.datasets.certificates("pets")
    assert server.json(link, "certificate") == certificate
    for path, panel in (("/datasets/pets@1", "certificates"), (link, "certificate")):
        printed = run_command(*commands_of(server.get(path)[2])[panel][1:])
        assert json.loads(printed.stdout) == server.json(path, panel)


def test_the_pictures_of_purged_samples_are_gone_from_a_server_that_has_shown_them(purged):
    _, server = purged
    rows = server.json("/datasets/pets@1/samples/train", "samples")["samples"]
    sizes = {row["key"]: row["values"]["image"]["bytes"] for row in rows}
    assert [key for key, size in sizes.items() if not size] == KEYS[2:4]


def test_a_certificate_is_found_by_the_start_of_its_digest_and_only_below_its_data_set(purged):
    repo, server = purged
    digest = repo.datasets.certificates("pets")[0]["certificate"]
    assert server.get(f"/datasets/pets/certificates/{digest[:8]}")[0] == 200
    table = repo.dataset("pets@1")["train"].digest
    for path in (f"/datasets/birds/certificates/{digest}", f"/datasets/pets/certificates/{table}"):
        assert server.get(path)[0] == 404
    assert repo.datasets.list_certificates("birds") == []


@pytest.mark.slow
def test_views_are_listed_with_what_they_select_and_opened_as_a_version_is(server, repo):
    html = server.get("/datasets/pets@2")[2]
    rows = re.findall("<tr><th.*?</tr>", part(html, '<section aria-label="Views"'), re.DOTALL)
    assert [re.sub(r"\d+ (s|minutes?) ago|now", "TIME", words(row)) for row in rows[1:]] == [
        """dogs pets@1 train 12 ("class" = 'dog') no TIME : half""",
        """even pets@1 train 12 ("class" = 'dog'); balanced(label, 1) yes TIME""",
    ]
    link = html_module.unescape(re.findall(r'href="([^"]*)">dogs</a>', html)[0])
    page = server.get(link)[2]
    assert """A view: ("class" = 'dog') . All samples of pets@1 train""" in words(page)
    keys = [sample["key"] for sample in repo.dataset("pets[dogs]")["train"][:]]
    found = server.json(link, "samples")
    assert [row["key"] for row in found["samples"]] == keys
    assert json.loads(run_command(*commands_of(page)["samples"][1:]).stdout) == found
    sample, picture = (re.findall(f'{name}="({re.escape(link)}/2[^"]*)"', page)[0] for name in ("href", "src"))
    assert keys[2] in server.get(sample)[2]
    headers = server.get(picture)[1]
    assert (headers["Content-Type"], "immutable" in headers["Cache-Control"]) == ("image/jpeg", True)
    by_name = "/datasets/pets%5Bdogs%5D/samples/train"
    assert server.json(by_name, "samples") == found
    assert server.get(f"{by_name}?where=width+%3E+1&view=table")[0] == 200


def test_a_condition_in_an_address_is_refused_and_leaves_no_view(server, repo):
    num_objects = sum(1 for _ in repo.repository.storage.walk("objects"))
    for condition in ("label=0", "label"):  # the latter has the form of a name, and is a column
        status, _, html = server.get(f"/datasets/pets@1%5B{condition}%5D/samples/train")
        assert (status, "give a condition as where=" in html) == (400, True)
    assert server.get("/datasets/pets%5Bcats%5D/samples/train")[0] == 404
    assert server.get(f"/datasets/pets@1%5B{'0' * 64}%5D/samples/train")[0] == 404
    assert sum(1 for _ in repo.repository.storage.walk("objects")) == num_objects


@pytest.mark.slow
def test_a_batch_of_a_step_is_shown_as_the_training_got_it(server, repo):
    run = f"/runs/cnn/{RUN}"
    assert f'action="{run}/batch"' in server.get(run)[2]
    html = server.get(f"{run}/batch?step=2")[2]
    found = repo.models.batch_at(f"cnn/{RUN}@2")
    cells = re.findall("<li><a.*?</li>", part(html, '<section aria-label="Samples">'), re.DOTALL)
    assert [words(cell) for cell in cells] == [
        f"{key} class {key[:3]}, position {position}"
        for key, position in zip(found.keys, found.positions.tolist(), strict=True)
    ]
    assert server.json(f"{run}/batch?step=2", "batch") == found.to_json()
    pictures = [html_module.unescape(path) for path in re.findall(r'<img src="([^"]*)"', html)]
    with urllib.request.urlopen(server.url + pictures[3]) as response:
        shown = np.asarray(Image.open(response))
    expected = to_levels(found.batch.images.numpy(), found.batch.display)
    assert (shown == expected[3]).all()
    for query, status in (("step=0", 400), ("step=2&rank=9", 400), ("step=x", 400)):
        assert server.get(f"{run}/batch?{query}")[0] == status
    assert server.get(f"{run}/batch/image/8?step=2")[0] == 404
    assert "after the last version" in words(server.get(f"{run}/batch?step=7")[2])


def test_a_batch_whose_pixels_are_too_many_is_listed_by_its_keys(repo, monkeypatch):
    monkeypatch.setattr(replayed, "_MAX_PIXEL_BYTES", 100)
    sheet = replayed.make_sheet(repo.repository, f"cnn/{RUN}@1", None, 5)
    assert (sheet.previews, len(sheet.batch["samples"])) == ([], 8)
    assert "look at those of a rank" in sheet.fault


@pytest.mark.slow
def test_evaluation_samples_in_the_training_are_found_on_request_and_once(server, repo, monkeypatch):
    link = html_module.unescape(re.findall(r'href="([^"]*)#evaluated">find them', server.get("/models/cnn@2")[2])[0])
    found = part(server.get(link)[2], 'id="evaluated">')
    text = words(found)
    counts = re.search(r"(\d) of (\d) samples of pets@1/val .* (\d) of them", text)
    assert counts.groups() == ("1", "2", "1")
    assert "cat/copy.jpg in pets@1/val cat/00000.jpg in pets@1/train yes" in text
    assert server.json(link, "evaluated") == repo.models.find_evaluated("cnn@2").to_json()
    monkeypatch.setattr("datasvc.ui.pages.model._MAX_EVALUATED", 0)
    other = link.replace("evaluated=1", "evaluated=2")  # the page that was shown last is not kept for it
    text = words(part(server.get(other)[2], 'id="evaluated">'))
    assert "and 1 more" in text
    assert "cat/copy.jpg" not in text
    monkeypatch.undo()
    monkeypatch.delattr("datasvc.ui.caches.call_in_process")
    assert part(server.get(link)[2], 'id="evaluated">') == found


def test_a_version_says_which_samples_it_left_out_and_from_where(repo):
    split = repo.dataset("pets@1")["train"]
    masked = Masked.rows(split.digest, {0: [1, 2]}, since=(1, 8)) | Masked(((0, 3, 7),))
    loader = ImageLoader(split, batch_size=8, training=True, seed=0, decode="cpu", size=32, masked=masked)
    with loader:
        tracker = ConsumptionTracker(loader)
        next(iter(loader))
        repo.models.save("forgetful", {"w": np.zeros(1)}, step=1, data=[tracker.use()])
    facts = fact_texts(describe(repo.models.describe("forgetful@1")))
    assert facts["left out"] == "2 samples of pets@1/train, forgotten or purged, from epoch 1, position 8 on"
    assert facts["skipped"] == "4 positions of pets@1/train"
    assert "left out" not in fact_texts(describe(repo.models.describe("cnn@1")))


def test_the_pages_are_accessible_and_fit_a_narrow_window(server, purged, page):
    certificate = purged[0].datasets.list_certificates("pets")[0]["certificate"]
    for pages, path in (
        (server, "/diff/pets@1/pets@2"),
        (server, "/datasets/pets@2"),
        (server, "/datasets/pets%5Bdogs%5D/samples/train"),
        (server, f"/runs/cnn/{RUN}/signals/loss"),
        (server, f"/runs/cnn/{RUN}/batch?step=2"),
        (server, "/models/cnn@2?evaluated=1"),
        (purged[1], "/datasets/pets@1"),
        (purged[1], f"/datasets/pets/certificates/{certificate}"),
    ):
        pages.get(path)  # a batch takes longer than a browser waits for a page
        page.goto(pages.url + path)
        check_accessible(page)
        check_width(page)
        page.set_viewport_size({"width": 1280, "height": 800})
