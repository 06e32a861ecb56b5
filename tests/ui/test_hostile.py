"""Names that any program may choose, such as those of classes, metrics, runs and hosts, are text on every page."""

import http.server
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import quote, urlencode

import numpy as np
import pyarrow as pa
import pytest

import datasvc
from datasvc.loaders import ImageLoader
from datasvc.models import ConsumptionTracker
from datasvc.runs import RunLog
from datasvc.shards.format.schema import image_schema
from datasvc.shards.sources.common.source import BadSample
from datasvc.ui.server import PAGES
from tests.loaders.echo import EchoLoader, write_numbers
from tests.samples import jpeg
from tests.shards.written_versions import write_version
from tests.ui.conftest import check_width, running_ui
from tests.ui.test_cluster import cache

_CODE = "window.hacked=1"
_TAGS = [
    f"<script>{_CODE}</script>",
    f"<img src=x onerror={_CODE}>",
    f"<svg onload={_CODE}>",
    f"<svg><script>{_CODE}</script></svg>",
    f"</title><script>{_CODE}</script>",
    f"</textarea><script>{_CODE}</script>",
    f"</script><script>{_CODE}</script>",
    f"</style><script>{_CODE}</script>",
    f"<iframe srcdoc='<script>parent.{_CODE}</script>'></iframe>",
    f"<body onload={_CODE}>",
    f"<details open ontoggle={_CODE}>",
    f"<input autofocus onfocus={_CODE}>",
    f"<a href='javascript:{_CODE}'>x</a>",
    "<meta http-equiv=refresh content=0;url=//evil.example>",
    "<base href=//evil.example>",
    "<link rel=stylesheet href=//evil.example>",
    "<form action=//evil.example><button>x</button></form>",
    "<b>bold</b><h1>head</h1><!--",
    "<div id=main hx-get=//evil.example hx-trigger=load>",
    "<template><p>",
]
_QUOTES = [
    f'" onload="{_CODE}',
    f"' onload='{_CODE}",
    f'"><script>{_CODE}</script>',
    f"'><script>{_CODE}</script>",
    f"`{_CODE}`",
    f"'-{_CODE}-'",
    f'");{_CODE};//',
    "'; drop table samples --",
    '"}],"x":[{"y":"',
    "\\",
    "a\\u003cscript\\u003e",
]
_TEMPLATES = ["{{ 7 * 7 }}", "{% raw %}", "${7*7}", "#{7*7}", "%s%n%(x)s", "{0}", "&lt;b&gt;", "&#60;b&#62;", "&amp"]
_CONTROLS = [
    "a\u202eb",
    "a\u2066b\u2069c",
    "zero\u200bwidth",
    "bell\x07",
    "escape\x1b[31mred",
    "line\nbreak\r\ttab",
    "\x7f\x85",
    "\ufffe\uffff",
    "z" + "\u0301" * 30,
    "W" * 3000,
]
HOSTILE = [*_TAGS, *_QUOTES, *_TEMPLATES, *_CONTROLS]
# The longest text and the last ones are in each list that a page shortens.
SOME = [HOSTILE[0], HOSTILE[1], _QUOTES[0], _CONTROLS[0], _CONTROLS[-1]]
_RAW = re.compile("[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f\\x85\u200b\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


@contextmanager
def hostile_node():
    """Yield the URL of a server whose status document has hostile names."""
    job = {"id": "1", "ref": HOSTILE[0], "split": HOSTILE[1], "state": "failed", "error": HOSTILE[2]}
    job |= {"total_bytes": 1, "done_bytes": 1, "bytes": {"resident": 0, "origin": 1, "peer": 0}}
    peer = dict.fromkeys(("num_ok", "num_missing", "num_failed", "bytes_received"), 1) | {"num_lying": 1}
    usage = {"used_bytes": 1, "guaranteed_bytes": 0, "maximum_bytes": None}
    status = {
        "cache": {
            **cache(folder=HOSTILE[3], quarantined_bytes=1, corrupt=1),
            "num_resident": 1,
            "tenants": dict.fromkeys(HOSTILE, usage),
            "jobs": [{"lease_id": text, "note": text, "clock_bytes": 1} for text in HOSTILE],
        },
        "jobs": [job],
        "peers": dict.fromkeys(HOSTILE, peer),
    }

    class Status(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(status).encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Status)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def write_hostile_run(repository):
    """Write the log of a run with hostile texts in all places that a program chooses; return its reference."""
    with RunLog.open(
        repository,
        "cnn",
        config={text: text for text in HOSTILE},
        data=HOSTILE,
        parent=HOSTILE[0],
        code={text: text for text in SOME},
        facts={text: [text] for text in SOME},
        world_size=2,
    ) as log:
        for step in (1, 2):
            log.report("step", step=step, step_s=1, wait_s=1, unit=HOSTILE[0], epoch=HOSTILE[1], coverage=0.5)
            log.report("step", step=step, **{text: float(step) for text in SOME})
        for text in HOSTILE:
            log.report(text, **{"step": 1, text: text})
            log.report("checkpoint", step=2, version=text)
        log.report("stall", step=1, wait_s=HOSTILE[0])
        log.report("evaluation", step=1, **dict.fromkeys(SOME, 0.5))
        log.report("diagnosis", verdict=f"starved by {HOSTILE[0]}")
        log.report("ranks", num_ranks=HOSTILE[0], rank=HOSTILE, host=HOSTILE, stragglers=HOSTILE, step=HOSTILE[1])
        log.close("failed", HOSTILE[0])
    return log.ref


def record_hostile_samples(repo, run):
    """Record a signal of samples with hostile keys, and a version of the run that was trained on them."""
    split = repo.dataset("odd@1")["train"]
    with ImageLoader(split, batch_size=25, training=True, seed=0, decode="cpu", size=16) as loader:
        repo.runs.record(run, loader)
        tracker = ConsumptionTracker(loader)
        for batch in loader:
            loader.record(batch, np.arange(25.0))
        uses = [tracker.use(), replace(tracker.use(), purpose="evaluation")]
        repo.models.save("cnn", {"w": np.zeros(1)}, step=2, data=uses, run=run)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The pages of a repository, a node and a ledger in which everything that may be named has a hostile name."""
    folder = tmp_path_factory.mktemp("hostile")
    repo = datasvc.open(str(folder / "repo"), create=True)
    image = {"image": jpeg(), "width": 40, "height": 30}
    samples = [{"key": text, "label": number, **image} for number, text in enumerate(HOSTILE)]
    bad = [BadSample(SOME[0], text, f"reason {text}") for text in HOSTILE]
    for message in SOME[:2]:
        splits, schema = {"train": [samples]}, image_schema(labelled=True)
        write_version(repo.repository, "odd", splits, schema, HOSTILE, message=message, bad=bad)
        samples = samples[1:]
    table = pa.table({"key": HOSTILE[2:5], "label": HOSTILE[5:8]})
    repo.datasets.columns.set("odd", "label", table)
    quoted = HOSTILE[26].replace("'", "''")
    repo.datasets.save_view("some", repo.dataset("odd@1")["train"].where(f"key <> '{quoted}'"), message=HOSTILE[0])
    schema = image_schema(labelled=True)
    gone = [{"key": text, "label": 0, "image": jpeg(seed=9), "width": 40, "height": 30} for text in HOSTILE]
    write_version(repo.repository, "gone", {"train": [gone]}, schema, HOSTILE[:1])
    repo.datasets.purge("gone", keys=HOSTILE, by=HOSTILE[0], message=HOSTILE[1], dry_run=False)
    certificate = repo.datasets.list_certificates("gone")[0]["certificate"]
    for step in (1, 2):
        repo.models.save(
            "net",
            {text: [step] for text in SOME},
            step=step,
            metrics=dict.fromkeys(HOSTILE, float(step)),
            config={text: text for text in HOSTILE},
            message=HOSTILE[step],
        )
    write_numbers(repo.repository, [4])
    ledger = folder / "ledgers" / "<b onclick='x'>"
    with EchoLoader(repo.dataset("numbers")["train"], batch_size=2, ledger=ledger) as loader:
        assert len(list(loader)) == 2
    with (
        hostile_node() as node,
        running_ui(
            folder / "repo",
            nodes=(node, "http://127.0.0.1:1"),
            ledgers=folder / "ledgers",
            thumbnails=folder / "thumbnails",
        ) as server,
    ):
        runs = [write_hostile_run(repo.repository) for _ in range(2)]
        record_hostile_samples(repo, runs[0])
        compared = {f"run:{ref}": "1" for ref in (*runs, *SOME)}
        yield (
            server,
            {
                "/": ["/"],
                "/search": [f"/search?q={quote(text)}" for text in SOME],
                "/datasets": ["/datasets"],
                "/datasets/{ref}": ["/datasets/odd@2", f"/datasets/odd?{urlencode({'where': HOSTILE[0]})}"],
                "/diff/{old}/{new}": ["/diff/odd@1/odd@2", "/diff/odd@2/odd@3"],
                "/datasets/{ref}/certificates/{certificate}": [f"/datasets/gone/certificates/{certificate}"],
                "/datasets/{ref}/samples/{split}": [
                    "/datasets/odd@1/samples/train",
                    "/datasets/odd[some]/samples/train",
                    f"/datasets/odd@1/samples/train?{urlencode({'where': HOSTILE[0], 'order': HOSTILE[1]})}",
                ],
                "/datasets/{ref}/samples/{split}/{position}": [
                    f"/datasets/odd@1/samples/train/{number}" for number in (0, 1, len(HOSTILE) - 1)
                ],
                "/datasets/{ref}/samples/{split}/{position}/image/{column}": [],
                "/models": ["/models"],
                "/models/{ref}": [
                    "/models/cnn@1?evaluated=1",
                    "/models/net@2",
                    f"/models/net?{urlencode({'metric': HOSTILE[0]})}",
                ],
                "/lineage/{ref}": ["/lineage/net@2", f"/lineage/odd@1?{urlencode({'key': HOSTILE[0]})}"],
                "/audit/{ledger}": [f"/audit/{quote(ledger.name)}"],
                "/compare": ["/compare"],
                "/compare/{a}/{b}": ["/compare/net@1/net@2"],
                "/runs": ["/runs"],
                "/runs/compare": [f"/runs/compare?{urlencode(compared | dict.fromkeys(SOME, '1'))}"],
                "/runs/{name}/{id}": [f"/runs/{runs[0]}"],
                "/runs/{name}/{id}/batch": [f"/runs/{runs[0]}/batch?step=1", f"/runs/{runs[0]}/batch?rank=x"],
                "/runs/{name}/{id}/batch/image/{column}": [],
                "/runs/{name}/{id}/signals/{signal}": [
                    f"/runs/{runs[0]}/signals/loss",
                    f"/runs/{runs[0]}/signals/a<",
                ],
                "/cluster": ["/cluster"],
                "/planner": ["/planner?data=odd@1", f"/planner?{urlencode({'costs': HOSTILE[5]})}"],
            },
        )


def test_every_page_is_opened(hostile):
    assert hostile[1].keys() == PAGES.keys()


def test_rejected_samples_with_hostile_keys_and_reasons_are_listed_as_text(hostile, browser):
    server, addresses = hostile
    window = browser.new_page()
    window.goto(server.url + addresses["/datasets/{ref}"][0])
    rows = window.get_by_role("table", name="Rejected samples").locator("tbody tr").all()
    assert len(rows) == len(HOSTILE)
    # In the order of their keys. A key that is only markup shows its markup.
    shown = [row.locator("td").all_text_contents() for row in rows]
    for text in _TAGS:
        assert [SOME[0], text, f"reason {text}"] in shown
    window.close()


@pytest.mark.parametrize("path", [path for path in PAGES if not path.endswith("{column}")])
def test_hostile_names_are_text(hostile, browser, path):
    server, addresses = hostile
    assert len(HOSTILE) == 50
    context = browser.new_context()
    window = context.new_page()
    dialogs = []
    window.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    requests = []
    window.on("request", lambda request: requests.append(request.url))
    for address in addresses[path]:
        response = window.goto(server.url + address, wait_until="load")
        assert response.status < 500, address
        assert window.evaluate("window.hacked") is None
        assert not dialogs
        # Nothing of a name became an element, an attribute or an address.
        injected = window.evaluate(
            """() => [...document.querySelectorAll('*')].filter((each) =>
                ['iframe', 'base', 'object', 'embed'].includes(each.localName)
                || (each.localName === 'script' && !each.src)
                || [...each.attributes].some((attribute) => attribute.name.startsWith('on')
                    || ['href', 'src', 'action'].includes(attribute.name)
                    && /^\\s*javascript:/i.test(attribute.value))
            ).map((each) => each.outerHTML.slice(0, 200))"""
        )
        assert not injected, address
        assert all(url.startswith((server.url, "data:")) for url in requests), requests
        shown = window.evaluate("document.body.innerText + document.title")
        assert not _RAW.search(shown), (address, _RAW.search(shown))
        check_width(window)
        window.set_viewport_size({"width": 1280, "height": 800})
    context.close()
