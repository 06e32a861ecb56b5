"""The comparison of two model versions."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import datasvc
from datasvc.errors import UnavailableError
from datasvc.ui import caches
from datasvc.ui.caches import MeasuredChanges
from datasvc.ui.pages.compare import describe_change
from tests.support.gate import Gate
from tests.ui.conftest import check_accessible, check_width, running_ui, texts
from tests.ui.test_model import HOSTILE, printed


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """A repository with two versions of a model of several layers, with an optimizer, and a removed version."""
    url = tmp_path_factory.mktemp("compare") / "repo"
    repo = datasvc.open(str(url), create=True)
    for step in (1, 2, 3):
        fill = {name: torch.full((4, 4), float(step)) for name in ("weight", "bias")}
        repo.models.save(
            "net",
            {
                "model": {"conv": fill, "fc": {"weight": torch.ones(2)}, HOSTILE[0]: torch.full((2,), float(step))},
                "optimizer": {"state": {"0": {"exp_avg": torch.full((4,), 0.5 * step)}}},
                **({"extra": torch.zeros(1)} if step == 2 else {}),
            },
            step=step,
            config={"lr": 0.1 if step == 1 else 0.1000001, "text": HOSTILE[1] * step},
        )
    repo.models.remove(["net@3"])
    return url


@pytest.mark.slow
def test_values_and_tensors_are_what_the_command_line_prints(ui, filled):
    page = "/compare/cnn@2/cnn@4"
    assert ui.json(page, "values") == printed("models", "compare", "cnn@2", "cnn@4", repo=filled)
    assert ui.json(page, "tensors") == printed("models", "diff", "cnn@2", "cnn@4", "--no-norms", repo=filled)
    assert ui.json(f"{page}?norms=1", "tensors") == printed("models", "diff", "cnn@2", "cnn@4", repo=filled)


def test_one_comparison_is_measured_at_a_time_and_kept(layers, monkeypatch):
    monkeypatch.setattr(caches, "_PATIENCE_S", 0.0)
    changes = MeasuredChanges(str(layers))
    gate = Gate()
    monkeypatch.setattr(caches, "call_in_process", gate.before(lambda *given, command: given))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(changes.diff, "net@1", "net@2")
        gate.begun.wait()
        with pytest.raises(UnavailableError, match=r"from net@2 to net@1 is not ready yet.*one at a time"):
            changes.diff("net@2", "net@1")
        gate.open()
        assert first.result() == (str(layers), "datasvc.models.registry.diff:diff", "net@1", "net@2")
    monkeypatch.delattr(caches, "call_in_process")
    assert changes.diff("net@1", "net@2") is first.result()


@pytest.mark.slow
def test_the_tensors_are_read_only_on_request_and_their_size_is_told_before(layers):
    with running_ui(layers) as server:
        html = server.get("/compare/net@1/net@2")[2]
        assert server.json("/compare/net@1/net@2", "tensors")["tensors"]["changes"] == []
        # conv.weight and conv.bias of 64 bytes each, 2 hostile elements, 4 of the optimizer.
        assert "reads 152 bytes of each version" in " ".join(texts(html).split()).replace(" :", ":")
        assert '?norms=1"' in html
        changed = server.get("/compare/net@1/net@2?norms=1")[2]
    assert "model.conv, weight: 1" in changed
    assert "model.conv, bias: 1" in changed
    assert changed.count("<h3>Relative change of each layer of <code>model</code></h3>") == 1
    # The picture has its title for screen readers alone: the heading above it says the same.
    assert re.findall(r"<(\w+)[^>]*>relative change of optimizer</", changed) == ["title"]
    assert "model.fc" not in changed


def test_values_that_differ_do_not_look_equal(layers):
    with running_ui(layers) as server:
        text = texts(server.get("/compare/net@1/net@2")[2])
    assert "0.1000001" in text


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (240, 264, "+24 (+10 %)"),
        (0.5, 0.25, "-0.25 (-50 %)"),
        (0, 1.5, "+1.5"),
        (1, "a", ""),
        (None, 1, ""),
        (True, 2, ""),
    ],
)
def test_the_difference_of_numbers_is_told(first, second, text):
    assert describe_change(first, second) == text


def test_a_removed_version_is_compared_by_its_metadata(layers):
    with running_ui(layers) as server:
        html = server.get("/compare/net@2/net@3")[2]
    assert "net@3 was removed" in html
    assert "config.<wbr>text" in html


@pytest.mark.slow
def test_hostile_names_of_tensors_and_values_are_text(layers):
    with running_ui(layers) as server:
        html = server.get("/compare/net@1/net@2?norms=1")[2]
    assert "<script>alert" not in html
    assert "<img src=x" not in html
    assert "&lt;script&gt;alert" in html


def test_the_same_version_twice_and_unknown_ones_are_explained(ui):
    status, _, html = ui.get("/compare/cnn/cnn@4")
    assert (status, "are the same version, cnn@4" in html) == (400, True)
    assert ui.get("/compare/cnn/cnn@9")[0] == 404


def test_a_person_chooses_two_versions_and_measures_the_layers(ui, page):
    page.goto(f"{ui.url}/models/cnn@2")
    page.get_by_role("link", name="Compare with another version").click()
    page.get_by_label("second").fill("cnn@prod")
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("link", name="Measure the change of each layer").click()
    page.get_by_role("group").or_(page.get_by_role("img", name="relative change of model")).first.wait_for()
    check_accessible(page)
    check_width(page)
