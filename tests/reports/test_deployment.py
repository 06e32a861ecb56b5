"""What an operator of a cluster sees: boards that fill, manifests that a cluster admits, and quiet logs."""

import json
import os
import re
import socket
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

import datasvc
from datasvc.errors import ConfigError
from datasvc.loaders import ImageLoader, serve_loader_metrics
from datasvc.loaders.decode.pixels import import_codec
from datasvc.loaders.profiling import metrics
from datasvc.testing import small_dataset
from datasvc.trainer.recipes import train as loop
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.settings.options import parse_options

ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "deploy/grafana/datasvc.json").read_text())


@pytest.fixture
def servers(monkeypatch):
    """The servers of metrics that were started, on free ports, with the ports that were asked for."""
    found, real = [], metrics.start_http_server

    def serve(port, registry):
        found.append((port, *real(0, "127.0.0.1", registry)))
        return found[-1][1:]

    monkeypatch.setattr(metrics, "start_http_server", serve)
    return found


def scrape(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
        return {line.split("{")[0] for line in answer.read().decode().splitlines() if not line.startswith("#")}


def test_the_row_of_loaders_on_the_board_fills_while_datasvc_train_runs(servers, tmp_path, monkeypatch):
    """totvslabs/couchbase-exporter#30: a board whose queries name series that nothing exports stays empty."""
    url = str(tmp_path / "repo")
    small_dataset(url, samples=8)
    row = [panel for panel in BOARD["panels"] if "datasvc_loader" in json.dumps(panel.get("targets", ()))]
    named = set(re.findall(r"datasvc_loader_\w+", json.dumps([panel["targets"] for panel in row])))
    scraped, report = [], loop.report_step

    def report_and_scrape(run, *args, **options):
        scraped.append(scrape(servers[0][1]))
        return report(run, *args, **options)

    monkeypatch.setattr(loop, "report_step", report_and_scrape)
    loop.train(
        TrainConfig(repo=url, data="small", name="net", batch_size=4, max_steps=1, metrics_port=9100, run_log=False)
    )
    assert [port for port, *_ in servers] == [9100]
    assert named <= scraped[0]
    assert not servers[0][2].is_alive(), "the port is free for the next run"


def test_a_port_that_is_taken_ends_the_run_at_its_start_with_the_port(tmp_path):
    """prometheus/client_python#667: a second process of a machine asks for the same port."""
    loader = ImageLoader(
        small_dataset(str(tmp_path / "repo"), samples=4)["train"], batch_size=4, size=8, training=False
    )
    with socket.create_server(("", 0)) as taken, loader:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"on port {port}: .*; choose another"):
            serve_loader_metrics(port, {"val": loader})


HINTS = """Failed to load nvjpeg library! Please install CUDA toolkit or the nvJPEG python wheel.
Failed to load nvtiff library! Please install nvTIFF.
Note: If using nvImageCodec's Python distribution, it is enough to install the nvTIFF wheel
"""


@pytest.fixture
def imported_anew(tmp_path, monkeypatch):
    """Lets `nvidia.nvimgcodec` be imported from `tmp_path`."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "nvidia"}
    folder = tmp_path / "nvidia" / "nvimgcodec"
    folder.mkdir(parents=True)
    (tmp_path / "nvidia" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder / "__init__.py"
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        del sys.modules[name]
    sys.modules.update(kept)


def test_without_a_gpu_the_decoder_s_hints_about_gpu_libraries_are_not_printed(imported_anew, capfd):
    """NVIDIA/nvImageCodec#30: messages of its libraries that no setting turns off. Other output is passed on."""
    imported_anew.write_text(f"import os\nos.write(2, {(HINTS + 'a real error').encode()!r})\n")
    assert import_codec().__file__ == str(imported_anew)
    import_codec()
    os.write(2, b"\nlater")
    assert capfd.readouterr().err == "a real error\nlater"


@pytest.mark.parametrize("platform", ["darwin", "win32"])
@pytest.mark.parametrize(("program", "error"), [("train.py", ImportError), ("C:\\\\bin\\\\datasvc.exe", SystemExit)])
def test_another_system_than_linux_is_named_in_one_line(platform, program, error, monkeypatch):
    """amoffat/sh#576: on another system an import ends in an error about a module that it lacks."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(sys, "argv", [program])
    with pytest.raises(error, match=f"^datasvc runs on Linux only, and this is {platform}: use .*$"):
        exec(Path(datasvc.__file__).read_text(), {"__name__": "datasvc"})


def manifests(*names):
    paths = [ROOT / "deploy/kubernetes" / name for name in names]
    return [each for path in paths for each in yaml.safe_load_all(path.read_text()) if each]


def pods_of(documents):
    """Return the name and the pod of each workload."""
    for document in documents:
        spec = document.get("spec", {})
        jobs = [job["template"]["spec"]["template"]["spec"] for job in spec.get("replicatedJobs", ())]
        if "template" in spec:
            jobs.append(spec["template"]["spec"])
        yield from ((f"{document['kind']}/{document['metadata']['name']}", pod) for pod in jobs)


ALL_PODS = dict(pods_of(manifests("base/datasvc.yaml", "jobset.yaml", "baseline/statefulset.yaml")))


@pytest.mark.parametrize("workload", ALL_PODS)
def test_a_pod_has_limits_and_no_power_that_it_does_not_need(workload):
    """kube-logging/logging-operator#1945: a namespace that enforces `baseline` refuses pods with a hostPath."""
    pod = ALL_PODS[workload]
    paths = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
    assert paths == ([] if workload.startswith("StatefulSet") else ["/mnt/nvme/datasvc"]), "the cache, not its disk"
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        context, resources = container["securityContext"], container["resources"]
        assert "memory" in resources["limits"]
        assert {"cpu", "memory"} <= resources["requests"].keys()
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"]["drop"] == ["ALL"]
        assert set(context["capabilities"].get("add", ())) <= {"CHOWN", "FOWNER"}
        assert context.get("runAsUser") != 0 or container["name"] == "owner"


def test_the_servers_on_local_volumes_are_those_of_the_daemon_set():
    daemons, stateful = ALL_PODS["DaemonSet/datasvc"], ALL_PODS["StatefulSet/datasvc"]
    assert stateful["containers"] == daemons["containers"]
    assert stateful["securityContext"] == daemons["securityContext"]
    assert "initContainers" not in stateful
    (document,) = manifests("baseline/statefulset.yaml")
    claims = {claim["metadata"]["name"] for claim in document["spec"]["volumeClaimTemplates"]}
    mounts = {mount["name"] for mount in stateful["containers"][0]["volumeMounts"]}
    assert mounts == claims | {volume["name"] for volume in stateful["volumes"]}


def test_a_wrong_setting_ends_the_job_set_and_does_not_restart_it_a_hundred_times():
    """kubernetes-sigs/jobset#262: failures that each restart repeats must not use up the restarts."""
    job_set = manifests("jobset.yaml")[0]["spec"]
    (rule,) = job_set["failurePolicy"]["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job = job_set["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    names = [container["name"] for container in [*pod["initContainers"], *pod["containers"]]]
    rules = job["podFailurePolicy"]["rules"]
    assert [each["onExitCodes"]["containerName"] for each in rules] == names
    assert {tuple(each["onExitCodes"]["values"]) for each in rules} == {(2,)}
    assert pod["restartPolicy"] == "Never"


def test_the_alerts_and_the_board_for_kubernetes_are_those_of_the_other_files():
    (rule,) = manifests("monitoring/rules.yaml")
    rules = yaml.safe_load((ROOT / "deploy/prometheus/datasvc.rules.yaml").read_text())
    assert rule["spec"] == rules
    (board,) = manifests("monitoring/dashboard.yaml")
    assert json.loads(board["data"]["datasvc.json"]) == BOARD
    listed = yaml.safe_load((ROOT / "deploy/kubernetes/monitoring/kustomization.yaml").read_text())["resources"]
    assert listed == ["podmonitor.yaml", "rules.yaml", "dashboard.yaml"]


def test_the_job_of_slurm_trains_with_options_that_exist_and_saves_before_its_end():
    script = (ROOT / "deploy/slurm/train.sbatch").read_text()
    settings = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script, re.MULTILINE))
    assert settings["comment"] == "datasvc:digits@1"
    words = re.search(r"-m datasvc\.trainer (.*?) \|\|", script, re.DOTALL)[1].replace("\\\n", " ").split()
    found = parse_options(words, environ={"DATASVC_REPO": "s3://bucket/repo", "DATASVC_CACHE": "/scratch"}).config()
    assert int(found.grace.removesuffix("s")) < int(settings["signal"].partition("@")[2])
    assert found.global_batch % (int(settings["nodes"]) * int(settings["ntasks-per-node"])) == 0
    assert settings["ntasks-per-node"] == settings["gpus-per-node"]
