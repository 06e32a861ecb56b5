"""The Grafana board and the alert rules of deploy/ fit the metrics of real nodes and loaders."""

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from datasvc.loaders import ImageLoader, LoaderCollector
from datasvc.testing import small_dataset
from tests.support import servers
from tests.support.ports import reserved_ports

ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "deploy/grafana/datasvc.json").read_text())
RULES = ROOT / "deploy/prometheus/datasvc.rules.yaml"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
ALERT_TESTS = Path(__file__).with_name("alerts.test.yaml")
OF_PROMETHEUS = {"instance", "job"}  # labels that a scrape adds


def needs(program):
    """Skip a test where a program of Debian's package `prometheus` is missing, or must not be used."""
    if servers.are_replaced():
        return pytest.mark.skip(reason=servers.REPLACED)
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"needs {program} (package prometheus)")


def queries():
    """Return each expression of the board and the rules, and the labels that its legend or its texts use."""
    targets = [target for panel in BOARD["panels"] for target in panel.get("targets", ())]
    found = [(each["expr"], set(re.findall(r"{{(\w+)}}", each["legendFormat"]))) for each in targets]
    for rule in ALERTS:
        texts = " ".join(rule["annotations"].values())
        found.append((rule["expr"], set(re.findall(r"\$labels\.(\w+)", texts))))
    return found


@contextmanager
def started_prometheus(folder, port):
    """Run a server on the settings in a folder; gives a function that returns the answer to a query."""
    address = f"127.0.0.1:{port}"
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"]
    process = subprocess.Popen([*command, f"--web.listen-address={address}"], cwd=folder)

    def ask(query):
        assert process.poll() is None, "prometheus has ended"
        url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url) as answer:
                return json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code != 503:  # it loads its files
                raise
        except urllib.error.URLError:
            pass  # it does not listen yet
        return []

    try:
        yield ask
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def node(run, tmp_path):
    """A node with a peer that does not answer, and a loader on its data."""
    dataset = small_dataset(str(tmp_path / "repo"), samples=8)
    node = run(
        repositories=(str(tmp_path / "repo"),),
        peers="http://127.0.0.1:1,http://127.0.0.1:2",
        own_url="http://127.0.0.1:1",
    )
    node.ask("POST", "/stage", {"ref": "small"})
    node.wait_for(lambda status: status["jobs"][0]["state"] == "done" and status["peers"])
    return node, ImageLoader(dataset["train"], batch_size=4, size=8, training=False)


@pytest.fixture
def registry(node):
    found = CollectorRegistry()
    found.register(LoaderCollector({"train": node[1]}))
    return found


def test_every_query_names_metrics_and_labels_that_a_node_or_a_loader_exports(node, registry):
    texts = node[0].get("/metrics").body.decode(), generate_latest(registry).decode()
    exported = {
        sample.name: set(sample.labels)
        for text in texts
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for expression, shown in queries():
        metrics = set(re.findall(r"\bdatasvc_\w+|\bup\b", expression))
        assert metrics, expression
        known = set.union(OF_PROMETHEUS, *(exported[name] for name in metrics - {"up"}))
        selected = {name for part in re.findall(r"{(.*?)}", expression) for name in re.findall(r"(\w+)=", part)}
        grouped = {name.strip() for part in re.findall(r"by \((.*?)\)", expression) for name in part.split(",")}
        assert selected | grouped | shown <= known, expression


def test_every_number_of_a_node_is_on_the_board_or_in_a_rule(node):
    families = text_string_to_metric_families(node[0].get("/metrics").body.decode())
    exported = {sample.name for family in families for sample in family.samples}
    named = set(re.findall(r"datasvc_\w+", " ".join(expression for expression, _ in queries())))
    left_out = {
        "datasvc_cache_num_resident",  # counts beside bytes
        "datasvc_cache_evicted_objects_total",
        "datasvc_sent_objects_total",
        "datasvc_cache_served_bytes_total",  # of all servers that the cache ever had; the board shows this server's
    }
    assert exported - named == left_out


def test_the_board_has_what_grafana_needs_to_load_it():
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    by_name = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    assert by_name["datasource"]["type"] == "datasource"
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= place["x"] + place["w"] <= 24, panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {*by_name, "__range", "__rate_interval"}
    areas = [(p["x"] + dx, p["y"] + dy) for p in (each["gridPos"] for each in panels)
             for dx in range(p["w"]) for dy in range(p["h"])]  # fmt: skip
    assert len(set(areas)) == len(areas), "panels overlap"


def test_every_alert_says_what_happened_and_what_to_do():
    page = (ROOT / "docs/how-to/monitoring.md").read_text()
    assert re.findall(r"^\| `(Datasvc\w+)`", page, re.MULTILINE) == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["annotations"]["description"].endswith(".")


@needs("promtool")
def test_prometheus_accepts_the_rules_and_each_alert_fires_when_it_should():
    subprocess.run(["promtool", "check", "rules", RULES], check=True)
    subprocess.run(["promtool", "test", "rules", ALERT_TESTS], check=True)
    assert {rule["alert"] for rule in ALERTS} == set(re.findall(r'alertname="(\w+)"', ALERT_TESTS.read_text()))


@pytest.mark.slow
@needs("prometheus")
def test_a_real_prometheus_answers_every_query_of_the_board(node, registry, tmp_path):
    exporter, thread = start_http_server(0, "127.0.0.1", registry)
    targets = {"datasvc": node[0].url.removeprefix("http://"), "training": f"127.0.0.1:{exporter.server_port}"}
    jobs = [{"job_name": name, "static_configs": [{"targets": [each]}]} for name, each in targets.items()]
    settings = {"global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"}, "scrape_configs": jobs}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({**settings, "rule_files": [str(RULES)]}))
    with reserved_ports(1) as (port,), started_prometheus(tmp_path, port) as ask:
        for target in (target for panel in BOARD["panels"] for target in panel.get("targets", ())):
            expression = re.sub(r"\$__(range|rate_interval)", "5m", target["expr"])
            expression = re.sub(r"\$(instance|loader)", ".*", expression)
            while not (found := ask(expression)):  # until two scrapes are there; the time limit ends what never is
                pass
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert all(labels <= set(each["metric"]) for each in found), expression
    exporter.shutdown()
    thread.join()
