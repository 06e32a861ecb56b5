"""Access, errors, JSON twins, and what all pages share."""

import html as html_module
import json
import re
import urllib.error
import urllib.request
from urllib.parse import urlencode

import pytest

import datasvc
from datasvc.errors import ConfigError, UnavailableError
from datasvc.runs import RunLog
from datasvc.ui.settings import UiSettings
from tests.cli.command import run
from tests.ui.conftest import NoRedirects, running_ui, texts

TOKEN = "a-token-of-enough-characters"


def test_home_shows_data_sets_and_models_as_the_command_line_does(ui, filled):
    assert ui.json("/", "datasets") == json.loads(run("ls", "--repo", str(filled), "--json").stdout)
    assert ui.json("/", "models") == json.loads(run("models", "ls", "--repo", str(filled), "--json").stdout)
    _, _, html = ui.get("/")
    assert "2 data sets and 1 model" in texts(html)
    assert 'href="/datasets/pets@2"' in html
    assert "have met no corrupt or missing object since it was started" in texts(html)
    assert f"datasvc models verify --all --repo {filled}" in texts(html)


def test_home_says_that_no_problems_were_found_unless_there_are_some(tmp_path):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    none = "No problems were found on this page."
    with running_ui(tmp_path / "repo") as server:
        assert server.json("/", "problems") == []
        assert none in server.get("/")[2]
        with RunLog.open(repo.repository, "net") as log:
            log.close("failed", "out of memory")
        assert "out of memory" in server.json("/", "problems")[0]["text"]
        html = server.get("/")[2]
    assert "1 problem" in texts(html)
    assert none not in html


@pytest.mark.parametrize(
    ("path", "num_programs"), [("/", 4), ("/runs", 1), ("/models/cnn?last=2", 6), ("/cluster", 1)]
)
def test_each_line_of_python_of_a_page_runs(tmp_path, path, num_programs):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    repo.models.save("cnn", {"w": [1]}, step=1)
    RunLog.open(repo.repository, "cnn").close()
    with running_ui(tmp_path / "repo", nodes=("http://127.0.0.1:1",)) as server:
        html = server.get(path)[2]
    programs = set(re.findall(r"<pre[^>]*>(import datasvc\n[^<]*)</pre>", html))
    assert len(programs) == num_programs
    for program in programs:
        *imports, expression = html_module.unescape(program).splitlines()
        names = {}
        exec("\n".join(imports), names)
        if "127.0.0.1" in expression:
            with pytest.raises(UnavailableError):
                eval(expression, names)
        else:
            assert eval(expression, names) is not None


def test_an_empty_repository_shows_the_commands_that_fill_it(tmp_path):
    datasvc.open(str(tmp_path / "repo"), create=True)
    with running_ui(tmp_path / "repo") as server:
        assert "datasvc ingest FOLDER NAME" in server.get("/")[2]


@pytest.mark.parametrize("path", ["/nowhere", "/api/nowhere", "/datasets?page=x%00", "/?panel=x"])
def test_responses_have_the_security_headers_whatever_their_status(ui, path):
    _, headers, _ = ui.get(path)
    assert headers["Content-Security-Policy"].startswith("default-src 'self'")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "unsafe" not in headers["Content-Security-Policy"]


def test_an_untrusted_host_is_refused(ui):
    status, _, text = ui.get("/", Host="attacker.example")
    assert status == 421
    assert "attacker.example" in text
    assert ui.get("/", Host="localhost:1")[0] == 200


def test_a_page_for_other_machines_needs_a_token(tmp_path):
    with pytest.raises(ConfigError, match="--token-file"):
        UiSettings(repository=str(tmp_path), host="0.0.0.0")


def test_a_token_is_taken_from_a_header_or_from_a_strict_cookie(filled, tmp_path):
    with running_ui(filled, token=TOKEN) as server:
        assert server.get("/")[0] == 303
        assert server.get("/api/datasets")[0] == 401
        assert server.get("/static/style.css")[0] == 200
        assert server.get("/", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert server.get("/", Authorization=f"Bearer {TOKEN}x")[0] == 303
        port = server.url.rpartition(":")[2]
        assert server.get("/", Cookie=f"datasvc_page_{port}={TOKEN}")[0] == 303
        session = log_in(server, "/")["Set-Cookie"].partition(";")[0]
        assert session.startswith(f"datasvc_page_{port}=")
        assert server.get("/", Cookie=session)[0] == 200


def log_in(server, address):
    """Return the headers of the response to the form with the token."""
    request = urllib.request.Request(f"{server.url}/login", urlencode({"token": TOKEN, "next": address}).encode())
    with pytest.raises(urllib.error.HTTPError) as redirect:
        urllib.request.build_opener(NoRedirects).open(request)
    return redirect.value.headers


def test_a_link_leads_to_its_page_after_the_token(filled):
    with running_ui(filled, token=TOKEN) as server:
        login = server.get("/datasets/pets@2?split=val&where=label+%3D+1")[1]["Location"]
        html = server.get(login)[2]
        address = html_module.unescape(html.partition('name="next" value="')[2].partition('"')[0])
        assert address == "/datasets/pets@2?split=val&where=label+%3D+1"
        assert log_in(server, address)["Location"] == address
        for elsewhere in ("//evil.example", "/\\evil.example", "https://evil.example", "/\t/evil.example", "", "x"):
            assert log_in(server, elsewhere)["Location"] == "/"


def test_only_reading_methods_are_allowed(ui):
    request = urllib.request.Request(f"{ui.url}/datasets", data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 405


def test_an_error_is_a_page_and_below_api_json(ui):
    status, headers, html = ui.get("/nowhere")
    assert (status, headers.get_content_type()) == (404, "text/html")
    assert "Go to the start" in html
    status, headers, text = ui.get("/api/nowhere")
    assert (status, headers.get_content_type()) == (404, "application/json")
    assert json.loads(text)["error"]


def test_a_store_that_does_not_respond_shows_the_last_good_page(filled, monkeypatch):
    from datasvc.ui.pages import home

    with running_ui(filled) as server:
        assert "pets@2" in server.get("/")[2]

        def fail(_):
            raise UnavailableError("the store did not answer in 30 s")

        monkeypatch.setattr(home, "summarize_datasets", fail)
        status, _, html = server.get("/")
        assert status == 200
        assert "The store does not respond, so this page is" in html
        assert "pets@2" in html
        # A program must not take old values for new ones.
        assert server.get("/api/")[0] == 503


def test_search_finds_names_and_references(ui):
    assert [each["name"] for each in ui.json("/search?q=pe", "results")] == ["pets"]
    assert [each["name"] for each in ui.json("/search?q=pets@prod", "results")] == ["pets@2"]
    assert ui.json("/search?q=nothing@7", "results") == []
