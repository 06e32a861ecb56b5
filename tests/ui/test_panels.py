"""Each panel as a command, as Python and as JSON; the list of those that have no such line says why."""

import html as html_module
import json
import re
import shlex
from urllib.parse import quote

import pytest

import datasvc
from datasvc.errors import UnavailableError
from datasvc.runs import RunLog
from datasvc.ui.pages import runs as runs_page
from tests.cli.command import run
from tests.loaders.echo import EchoLoader, write_numbers
from tests.support.ports import reserved_ports
from tests.ui.conftest import fill_repository, running_ui

SEARCH = "a search asks about names, runs, keys and digests at once; each match leads to a page with a command"
WITHOUT = {
    ("command", "steps"): "no command predicts from numbers that somebody types; `profile` measures them",
    **{(kind, panel): SEARCH for kind in ("command", "python") for panel in ("results", "searched")},
}
# Search says what it has not searched only if there is something.
UNSHOWN = {"notes", "not_searched", "searched"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The pages of a repository that has something for each kind of page."""
    folder = tmp_path_factory.mktemp("panels")
    repo = fill_repository(folder / "repo")
    write_numbers(repo.repository, [4])
    with EchoLoader(repo.dataset("numbers")["train"], batch_size=2, ledger=folder / "ledgers" / "run") as loader:
        assert len(list(loader)) == 2
    for _ in range(3):
        with RunLog.open(repo.repository, "cnn", data=["pets@2"]) as log:
            log.report("step", step=1, loss=1.0)
    with (
        reserved_ports(2) as ports,  # of nodes that do not respond
        pytest.MonkeyPatch.context() as patch,
        running_ui(
            folder / "repo", nodes=tuple(f"http://127.0.0.1:{port}" for port in ports), ledgers=folder / "ledgers"
        ) as server,
    ):
        patch.setattr(runs_page, "_RUNS_PER_PAGE", 2)
        yield server, log.id


def paths(run_id):
    return [
        "/",
        "/search?q=pets",
        "/datasets",
        "/datasets/pets@2",
        "/datasets/birds@1",
        "/diff/pets@1/pets@2",
        "/datasets/pets@2/samples/train?view=table",
        "/datasets/pets@2/samples/train/3?models=1",
        "/models",
        "/models/cnn@3?last=2",
        "/compare/cnn@1/cnn@2?norms=1",
        "/lineage/cnn@4",
        f"/lineage/pets?key={quote('x')}",
        "/audit/run",
        "/audit/run?epoch=0",
        "/runs",
        "/runs?page=1",
        f"/runs/cnn/{run_id}",
        "/cluster",
        "/planner?data=pets@2&budget=150&batch=4&forward_ms=5&origin=10",
        "/planner?data=pets@2&budget=1",
    ]


def menus(html):
    """Return for each panel of a page its command and its lines of Python."""
    found = {}
    for name, content in re.findall(
        r'<summary aria-label="([^"]*): as command, as Python, as JSON">(.*?)</details>', html, re.DOTALL
    ):
        lines = {}
        for kind in ("command", "Python"):
            text = re.search(rf"<p>As {kind}</p><pre[^>]*>(.*?)</pre>", content, re.DOTALL)
            if text:
                lines[kind.lower()] = html_module.unescape(text[1])
        assert ">As JSON</a>" in content
        found[html_module.unescape(name)] = lines
    return found


@pytest.mark.slow
def test_every_panel_has_a_command_and_python_or_a_reason(served):
    server, run_id = served
    missing = set()
    for path in paths(run_id):
        status, _, html = server.get(path)
        assert status == 200, path
        shown = menus(html)
        panels = server.json(path).keys() - {"problems"} - UNSHOWN
        assert panels == shown.keys(), path
        missing |= {
            (kind, name) for name, lines in shown.items() for kind in ("command", "python") if kind not in lines
        }
    assert missing == {(kind, panel) for kind, panel in WITHOUT if panel not in UNSHOWN}


def test_the_commands_and_the_lines_that_were_added_last_give_the_values_of_their_panels(served):
    server, _ = served
    for path, names in {
        "/models/cnn@3": ("stored", "signatures"),
        "/runs?page=1": ("runs",),
        "/cluster": ("placement",),
        "/planner?data=pets@2&budget=150&batch=4&forward_ms=5": ("plan", "steps"),
        "/audit/run": ("audit",),
    }.items():
        values, shown = server.json(path), menus(server.get(path)[2])
        for name in names:
            if "command" in shown[name]:
                printed = run(*shlex.split(shown[name]["command"])[1:])
                assert printed.returncode == 0, printed.stderr
                assert json.loads(printed.stdout) == values[name], name
            *lines, expression = shown[name]["python"].splitlines()
            scope = {}
            exec("\n".join(lines), scope)
            result = eval(expression, scope)
            result = [each.to_dict() for each in result] if name == "runs" else result
            assert json.loads(json.dumps(result)) == values[name], name


def test_the_status_of_nodes_that_do_not_respond_is_an_error_in_python_too(served):
    server, _ = served
    *lines, expression = menus(server.get("/cluster")[2])["nodes"]["python"].splitlines()
    scope = {}
    exec("\n".join(lines), scope)
    with pytest.raises(UnavailableError):
        eval(expression, scope)


def test_two_answers_at_once_and_nodes_that_are_unknown_are_refused(filled):
    done = run("models", "show", "cnn@1", "--stored", "--signers", "--repo", filled)
    assert (done.returncode, "give one of them" in done.stderr) == (2, True)
    done = run("cache", "placement", "pets@1", "--node", "http://a", "--failed", "http://b", "--repo", filled)
    assert (done.returncode, "expected one or more nodes" in done.stderr) == (2, True)


def test_the_shards_of_a_node_that_does_not_respond_are_served_by_the_others(filled):
    nodes = [word for url in ("http://a", "http://b", "http://c") for word in ("--node", url)]
    command = ("cache", "placement", "pets@1", *nodes, "--failed", "http://b", "--repo", filled)
    found = json.loads(run(*command, "--json").stdout)["nodes"]
    num_shards = sum(counts["owns"]["shards"] for counts in found.values())
    repo = datasvc.open(str(filled))
    assert num_shards == sum(split.table.num_shards for split in repo.dataset("pets@1").values())
    assert sum(counts["serves"]["shards"] for counts in found.values()) == num_shards
    assert found["http://b"]["serves"] == {"shards": 0, "bytes": 0}
    assert all(found[url]["serves"]["shards"] >= found[url]["owns"]["shards"] for url in ("http://a", "http://c"))
    assert "http://b\t3\t" in run(*command).stdout
