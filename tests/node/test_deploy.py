"""The examples of deploy/ and the page cluster.md name commands and options that exist, and do what they say."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from datasvc.cli.main import make_app
from datasvc.node.http.auth import load_token
from datasvc.shards import ingest
from tests.node.conftest import RunningNode
from tests.support.pages import find_page

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "deploy/systemd/datasvc.service").read_text()
MANIFESTS = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/base/datasvc.yaml").read_text()))
PAGE = find_page("cluster.md")
GUIDE = PAGE.read_text()
TOKEN = "0123456789abcdef0123456789abcdef"


def parse(words):
    """Parse a command line as `datasvc` would, without running it; returns its values."""
    command = typer.main.get_command(make_app())
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command.make_context("datasvc", list(words)).params


def of_kind(kind):
    (found,) = [each for each in MANIFESTS if each["kind"] == kind]
    return found


def unit_values(name):
    joined = UNIT.replace("\\\n", " ")
    return re.findall(rf"^{name}=(.*)$", joined, re.MULTILINE)


def test_the_systemd_unit_starts_a_server_that_understands_its_options(monkeypatch):
    monkeypatch.setenv("DATASVC_REPO", "s3://bucket/repo")
    (line,) = unit_values("ExecStart")
    assert "%" not in line.replace("%%", ""), "a single % is a specifier of systemd"
    program, *words = shlex.split(line.replace("%%", "%"))
    assert Path(program).name == "datasvc"
    values = parse(words)
    assert (values["budget"], values["host"], values["port"]) == ("80%", "0.0.0.0", 8765)
    assert [str(values["cache"])] == unit_values("ReadWritePaths")
    assert str(values["token_file"]) == "${CREDENTIALS_DIRECTORY}/token"
    assert unit_values("LoadCredential")[0].startswith("token:")
    assert float(unit_values("TimeoutStopSec")[0]) > 3 * values["grace"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_the_unit_without_complaint(tmp_path):
    unit = tmp_path / "datasvc.service"
    unit.write_text(UNIT.replace("/opt/datasvc/bin/datasvc", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "datasvc" in line] == []


def test_the_daemon_set_starts_a_server_that_understands_its_options(monkeypatch):
    pod = of_kind("DaemonSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    monkeypatch.setenv("DATASVC_REPO", of_kind("ConfigMap")["data"]["DATASVC_REPO"])
    assert container["command"][0] == "datasvc"
    values = parse([*container["command"][1:], *container["args"]])
    port = container["ports"][0]["containerPort"]
    assert values["port"] == port == of_kind("Service")["spec"]["ports"][0]["port"]
    assert of_kind("NetworkPolicy")["spec"]["ingress"][0]["ports"] == [{"port": port}]
    service = of_kind("Service")["metadata"]
    assert values["peers"] == f"dns:{service['name']}.{service['namespace']}.svc.cluster.local:{port}"
    assert pod["terminationGracePeriodSeconds"] > 3 * values["grace"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert values["cache"].is_relative_to(mounts["cache"])
    assert values["token_file"].is_relative_to(mounts["token"])


def test_the_pods_of_the_manifests_find_each_other_and_share_the_cache():
    spec = of_kind("DaemonSet")["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == of_kind("Service")["spec"]["selector"]
    assert of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    assert of_kind("Service")["spec"]["publishNotReadyAddresses"] is True
    pod = spec["template"]["spec"]
    assert "hostPID" not in pod
    assert {volume["name"] for volume in pod["volumes"]} == {m["name"] for m in pod["containers"][0]["volumeMounts"]}
    assert pod["containers"][0]["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert pod["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/healthz"


def test_the_token_of_the_manifests_is_readable_and_not_for_everybody(tmp_path):
    (volume,) = [each for each in of_kind("DaemonSet")["spec"]["template"]["spec"]["volumes"] if "secret" in each]
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(volume["secret"]["defaultMode"])
    assert load_token(token, None) == TOKEN


def test_prometheus_scrapes_the_pods_with_their_token(run):
    monitor = yaml.safe_load((ROOT / "deploy/kubernetes/monitoring/podmonitor.yaml").read_text())
    pods = of_kind("DaemonSet")
    assert monitor["metadata"]["namespace"] == pods["metadata"]["namespace"]
    template = pods["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert "annotations" not in template["metadata"], "a scrape by annotations has no token"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    secret = endpoint["authorization"]["credentials"]
    command = f"create secret generic {secret['name']} --from-literal={secret['key']}="
    assert command in (ROOT / "deploy/kubernetes/base/datasvc.yaml").read_text()
    node = run(token=TOKEN)
    assert node.get(endpoint["path"], Authorization=f"{endpoint['authorization']['type']} {TOKEN}").status == 200


def test_the_scrape_configurations_of_the_guide_carry_the_token():
    for block in re.findall(r"^```yaml\n(scrape_configs:.*?)^```", GUIDE, re.MULTILINE | re.DOTALL):
        (job,) = yaml.safe_load(block)["scrape_configs"]
        assert "datasvc-token" in job["authorization"]["credentials_file"]


def commands_of(text):
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("datasvc ")]


@pytest.mark.parametrize("line", commands_of(GUIDE))
def test_commands_of_the_guide_exist_with_their_options(line, monkeypatch):
    monkeypatch.delenv("DATASVC_REPO", raising=False)
    parse(shlex.split(line, comments=True)[1:])


def test_the_guide_links_to_files_and_names_metrics_that_exist(node):
    for target in re.findall(r"\]\((\.\./[^)]+)\)", GUIDE):
        assert (PAGE.parent / target).is_file(), target
    assert (ROOT / "deploy/slurm/epilog.sh").is_file()
    metrics = node.get("/metrics").body.decode()
    for name in set(re.findall(r"`(datasvc_[a-z_]+)", GUIDE)):
        # Those of peers have no samples while there are none.
        assert f"# TYPE {name} " in metrics, name


@pytest.fixture
def slurm(run, origin, folder, tmp_path):
    """A node with a token, and what runs a script of deploy/slurm as slurmd would."""
    repository = origin[0]
    ingest(repository, str(folder), "pets", shard_bytes=2000)
    node = run(repositories=(repository.url,), token=TOKEN)
    token = tmp_path / "token"
    token.write_text(TOKEN)

    def call(script, comment, **changes):
        environment = {
            "SLURM_JOB_ID": "77", "SLURM_JOB_COMMENT": comment, "DATASVC_NODE": node.url,
            "DATASVC_TOKEN_FILE": str(token), "DATASVC_STATE": str(tmp_path / "state"), **changes,
        }  # fmt: skip
        # No search path is set for a prolog.
        return subprocess.run([ROOT / "deploy/slurm" / script], env=environment, capture_output=True, check=False)

    return node, call, tmp_path / "state/job-77"


def jobs_of(node: RunningNode):
    return node.get("/stage", Authorization=f"Bearer {TOKEN}").json["jobs"]


@pytest.mark.skipif(shutil.which("curl", path="/usr/bin:/bin") is None, reason="needs curl")
def test_a_slurm_job_stages_what_its_comment_names_and_cancels_it_at_its_end(slurm):
    node, call, kept = slurm
    assert call("prolog.sh", "datasvc:pets@1").returncode == 0
    (job,) = jobs_of(node)
    assert (job["ref"], kept.read_text().strip()) == ("pets@1", job["id"])
    assert call("epilog.sh", "datasvc:pets@1").returncode == 0
    assert not kept.exists()
    while (job := jobs_of(node)[0])["state"] in ("waiting", "running"):
        pass
    assert job["state"] in ("done", "cancelled")


@pytest.mark.parametrize(
    "comment",
    [
        "",
        "a comment",
        "datasvc:",
        "datasvc:../x",
        'datasvc:pets", "repo": "s3://x',
        'datasvc:pets", "split": "val',
        "datasvc:pets@1; id",
        "datasvc:$(id)",
    ],
)
def test_a_comment_that_names_no_data_set_starts_nothing(slurm, comment):
    node, call, kept = slurm
    assert call("prolog.sh", comment).returncode == 0
    assert (jobs_of(node), kept.exists()) == ([], False)


@pytest.mark.parametrize(
    "changes",
    [
        {"DATASVC_NODE": "http://127.0.0.1:9"},
        {"DATASVC_TOKEN_FILE": "/nowhere"},
        {"SLURM_JOB_COMMENT": "datasvc:nothing"},
    ],
    ids=str,
)
def test_a_job_starts_and_ends_though_nothing_can_be_staged(slurm, changes):
    node, call, kept = slurm
    assert call("prolog.sh", "datasvc:pets", **changes).returncode == 0
    assert (jobs_of(node), kept.exists()) == ([], False)
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("0123\n")
    assert call("epilog.sh", "", **changes).returncode == 0
    assert not kept.exists()
