"""The manifests of deploy/kubernetes, rendered by Kustomize and checked against the schemas of the API."""

import copy
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from datasvc.trainer.recipes.settings.options import parse_options
from tests.node.custom_resources import SCHEMAS
from tests.node.test_deploy import MANIFESTS, of_kind, parse

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
JOB_SET, JOB_POLICY = yaml.safe_load_all((FOLDER / "jobset.yaml").read_text())
KUBERNETES = "1.34"


def job_of(job_set):
    """Return the Job that the JobSet controller makes."""
    (replicated,) = job_set["spec"]["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": job_set["metadata"], **replicated["template"]}


def files_of(folder):
    """Return the manifests that a kustomization lists, those of its bases and components too."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    found = []
    for name in [*kustomization.get("resources", ()), *kustomization.get("components", ())]:
        path = folder / name
        found += files_of(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    return found


def render(folder):
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def test_every_manifest_keeps_the_schema_of_the_api():
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate").validate
    rendered = render(FOLDER / "example") if shutil.which("kubectl") else []
    for manifest in [
        *files_of(FOLDER / "example"),
        *rendered,
        *files_of(FOLDER / "baseline"),
        job_of(JOB_SET),
        JOB_POLICY,
    ]:
        if manifest["kind"] not in SCHEMAS:
            validate(manifest, KUBERNETES, strict=True)


def test_the_custom_resources_keep_the_schemas_of_their_projects():
    rendered = render(FOLDER / "example") if shutil.which("kubectl") else []
    manifests = [each for each in [*files_of(FOLDER / "example"), *rendered, JOB_SET] if each["kind"] in SCHEMAS]
    assert {each["kind"] for each in manifests} == SCHEMAS.keys()
    for manifest in manifests:
        jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["spec", "failurePolicy", "maxRestart"], 1),
        (["spec", "failurePolicy", "maxRestarts"], "100"),
        (["spec", "replicatedJobs", 0, "replica"], 1),
        (["apiVersion"], "jobset.x-k8s.io/v1alpha1"),
    ],
)
def test_the_schema_of_a_custom_resource_refuses_a_wrong_field(place, value):
    changed = copy.deepcopy(JOB_SET)
    part = changed
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed, SCHEMAS["JobSet"])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_the_overlay_changes_what_the_base_marks():
    base, changed = (render(FOLDER / name) for name in ("base", "example"))
    assert sorted(each["kind"] for each in base) == sorted(each["kind"] for each in MANIFESTS)
    kinds = {each["kind"]: each for each in changed}
    assert set(kinds) == {each["kind"] for each in base} | {"PodMonitor", "PrometheusRule"}
    pod = kinds["DaemonSet"]["spec"]["template"]["spec"]
    images = {container["image"] for container in (*pod["initContainers"], *pod["containers"])}
    assert images == {"registry.example.com/team/datasvc:0.1.0"}
    assert pod["nodeSelector"]
    served = of_kind("DaemonSet")["spec"]["template"]["spec"]
    assert pod["volumes"][0]["hostPath"]["path"] != served["volumes"][0]["hostPath"]["path"]
    assert kinds["ConfigMap"]["data"] != of_kind("ConfigMap")["data"]


def test_the_training_stages_into_the_cache_of_the_node_and_trains_from_it():
    pod = job_of(JOB_SET)["spec"]["template"]["spec"]
    (stage,), (train,) = pod["initContainers"], pod["containers"]
    served = of_kind("DaemonSet")["spec"]["template"]["spec"]
    repository = of_kind("ConfigMap")["data"]["DATASVC_REPO"]
    values = {each["name"]: each["value"] for each in train["env"] if "value" in each} | {"DATASVC_REPO": repository}
    options = parse([*stage["command"][1:], *stage["args"]])
    assert stage["env"] == train["env"]
    settings = parse_options(train["args"][train["args"].index("datasvc.trainer") + 1 :], environ=values).config()
    assert (options["refs_or_urls"], settings.repo) == ([settings.data], repository)
    (server,) = served["containers"]
    assert {f"--cache={settings.cache}", f"--peers={settings.peers}"} <= set(server["args"])
    assert train["envFrom"] == stage["envFrom"] == server["envFrom"]
    assert pod["volumes"][0] == served["volumes"][0]
    assert pod["securityContext"] == served["securityContext"]
    assert stage["securityContext"] == train["securityContext"] == server["securityContext"]
    assert pod["terminationGracePeriodSeconds"] > int(settings.grace.removesuffix("s"))


def test_the_pods_of_the_training_meet_at_the_name_of_the_first_and_admit_each_other_only():
    name, job = JOB_SET["metadata"]["name"], job_of(JOB_SET)["spec"]
    (train,) = job["template"]["spec"]["containers"]
    options = dict(word.split("=", 1) for word in train["args"] if "=" in word)
    (replicated,) = JOB_SET["spec"]["replicatedJobs"]
    assert options["--master-addr"] == f"{name}-{replicated['name']}-0-0.{name}"
    assert int(options["--nnodes"]) == job["parallelism"] == job["completions"]
    assert int(options["--nproc-per-node"]) == train["resources"]["limits"]["nvidia.com/gpu"]
    assert int(options["--master-port"]) == train["ports"][0]["containerPort"]
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}
    assert JOB_POLICY["spec"]["podSelector"] == own
    assert JOB_POLICY["spec"]["ingress"] == [{"from": [{"podSelector": own}]}]
    (admitted,) = [each["from"][1] for each in of_kind("NetworkPolicy")["spec"]["ingress"]]
    assert admitted["podSelector"]["matchLabels"].items() <= job["template"]["metadata"]["labels"].items()
