"""The commands and programs of the tutorials run as they stand, but for what only a reader has: GPUs, nodes."""

import re
import shlex
import socket

import pytest
import yaml

from datasvc.models import describe_model
from datasvc.repository import Repository
from datasvc.trainer.recipes.settings.options import parse_options
from tests.support.doc_blocks import read_blocks, replace_in, run_blocks
from tests.support.pages import ROOT


def runnable(page):
    return [block for block in read_blocks(page) if block.language in {"sh", "python"}]


@pytest.mark.slow
@pytest.mark.long
def test_the_tutorial_on_s3_and_eight_gpus_runs_with_two_ranks_on_a_processor(tmp_path, s3_bucket):
    blocks = replace_in(
        runnable("s3-gpus.md"),
        {
            "s3://bucket/repo": f"{s3_bucket}/tutorial",
            "/nvme/cache": str(tmp_path / "cache"),
            "-np 8": "-np 2",
            "-np 4": "-np 1",
            "--device cuda": "--device cpu",
        },
    )
    run_blocks(blocks, tmp_path, OMP_NUM_THREADS="1")
    repository = Repository.open(f"{s3_bucket}/tutorial")
    first, last = (describe_model(repository, ref).entry for ref in ("digits-cnn@1", "digits-cnn"))
    assert (first["config"]["epochs"], last["config"]["epochs"]) == (2, 3)
    assert last["config"]["cache"] == str(tmp_path / "cache")
    assert list((tmp_path / "cache").rglob("*"))


@pytest.mark.slow
def test_the_tutorial_on_many_nodes_runs_as_an_allocation_of_one_node(tmp_path):
    blocks = replace_in(
        runnable("many-nodes.md"),
        {"/shared/": f"{tmp_path}/", "/scratch/": f"{tmp_path}/", "--device cuda": "--device cpu"},
    )
    host = socket.gethostname()
    allocation = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": host, "SLURM_TASKS_PER_NODE": "2"}
    printed = run_blocks(blocks, tmp_path, OMP_NUM_THREADS="1", **allocation)
    assert "epoch 1: proven: no sample was lost or served twice; " in printed


def test_the_pods_of_the_tutorial_start_the_training_program_with_options_that_it_has():
    (block,) = [block for block in read_blocks("many-nodes.md") if block.language == "yaml"]
    service, job = yaml.safe_load_all(block.text)
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] == service["spec"]["selector"]["job-name"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    (container,) = pod["containers"]
    words = shlex.split(container["args"][0])
    assert words[words.index("--master-addr") + 1] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    program = words[words.index("datasvc.trainer") + 1 :]
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    settings = parse_options(program, environ=variables).config()
    assert (settings.repo, settings.cache) == ("s3://bucket/repo", "/cache")
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/base/datasvc.yaml").read_text())
    served = next(each for each in documents if each["kind"] == "DaemonSet")["spec"]["template"]["spec"]
    assert pod["volumes"] == [volume for volume in served["volumes"] if volume["name"] == "cache"]
    assert container["volumeMounts"][0] in served["containers"][0]["volumeMounts"]
    assert f"--cache={settings.cache}" in served["containers"][0]["args"]
    assert f"--peers={settings.peers}" in served["containers"][0]["args"]
    assert pod["securityContext"].items() <= served["securityContext"].items()


@pytest.mark.slow
def test_the_tutorial_on_horovod_runs(tmp_path):
    printed = run_blocks(runnable("horovod.md"), tmp_path, OMP_NUM_THREADS="1")
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\S+)", printed)]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert "44 steps: digits-hvd@2" in printed


@pytest.mark.slow
def test_the_tutorial_on_checkpoints_runs_and_its_program_resumes(tmp_path):
    blocks = runnable("checkpoints.md")
    printed = run_blocks(blocks, tmp_path)
    assert re.findall(r"begins at step (\d+)", printed) == ["0", "60"]
    left = Repository.open(str(tmp_path / "repo")).living("models", "regressor")
    assert left[-1] == 3
    assert len(left) < 3
    assert (tmp_path / "torch" / "checkpoint.pt").exists()
