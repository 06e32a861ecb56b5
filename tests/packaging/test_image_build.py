"""The images of deploy/docker, built with buildah and run as their pods run them: user 1000, a read-only root."""

import json
import os
import subprocess
from contextlib import contextmanager

import pytest

import datasvc
from tests.packaging.chroots import Buildah, enter, make_system, need_chroots
from tests.said import say
from tests.samples import write_folder
from tools.build_release import ROOT

MAX_UNPACKED, MAX_COMPRESSED = 350e6, 150e6

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


class Image:
    """An image, and folders for what its containers write.

    Args:
        buildah: what builds it.
        name: its name.
        folder: where the volumes of its containers are.
    """

    def __init__(self, buildah, name, folder):
        self.name = name
        self.config = buildah.configuration(name)
        self.root = buildah.mount(name)
        self.volumes = {
            path: folder / path.strip("/").replace("/", "-") for path in ("/tmp", "/cache", "/etc/datasvc")
        }
        (self.root / "etc/datasvc").mkdir()  # a run-time creates the folders at which it mounts
        for path in self.volumes.values():
            path.mkdir(parents=True)
        (self.volumes["/etc/datasvc"] / "token").write_text("0123456789abcdef0123\n")
        (self.volumes["/etc/datasvc"] / "token").chmod(0o600)
        write_folder(self.volumes["/tmp"] / "photos", {"train": {"a": 4, "b": 4}, "val": {"a": 2}})

    def words(self, *words, network=True):
        """Return the words that run a program in a container."""
        for path in self.volumes.values():
            subprocess.run(["chown", "-R", self.config["User"], path], check=True)
        variables = dict(each.split("=", 1) for each in self.config["Env"])
        variables |= {"DATASVC_REPO": "/tmp/repo", "COLUMNS": "200"}
        return enter(
            *(self.root, *words),
            variables=variables,
            volumes=self.volumes,
            user=self.config["User"],
            folder=self.config["WorkingDir"],
            read_only=True,
            network=network,
        )

    def said(self, *words):
        done = subprocess.run(self.words(*words), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def started(self):
        """Run the command of the image in a network of its own; yields the process once it accepts connections."""
        process = subprocess.Popen(self.words(*self.config["Cmd"], network=False), stdout=subprocess.PIPE, text=True)
        try:
            assert "http://" in process.stdout.readline()
            yield process
        finally:
            process.terminate()
            process.communicate()


@pytest.fixture(scope="module")
def buildah(tmp_path_factory, index):
    need_chroots("buildah", "ip")
    folder = tmp_path_factory.mktemp("images")
    make_system("bookworm", folder / "base.tar")
    made = Buildah(folder)
    made.make_base("localhost/base", folder / "base.tar")
    (folder / "base.tar").unlink()
    yield made
    made.close()


@pytest.fixture(scope="module")
def build(buildah, wheel, tmp_path_factory):
    """Build a stage of the Dockerfile with the stages that it needs: another one would install torch with CUDA."""
    context = tmp_path_factory.mktemp("context")
    (context / "dist").mkdir()
    (context / "dist" / wheel.name).write_bytes(wheel.read_bytes())
    (context / "constraints.txt").write_bytes((ROOT / "constraints.txt").read_bytes())

    def run(target, *options):
        other = {"serve": "train", "train": "serve"}[target]
        stages = (ROOT / "deploy/docker/Dockerfile").read_text().split("\nFROM ")
        kept = [each for each in stages if not each.splitlines()[0].endswith((f" AS {other}", f" AS build-{other}"))]
        assert len(kept) == len(stages) - 2
        (context / "Dockerfile").write_text("\nFROM ".join(kept))
        name = f"localhost/{target}"
        buildah.build(name, context, "--build-arg=BASE=localhost/base", *options)
        return Image(buildah, name, tmp_path_factory.mktemp(target))

    return run


@pytest.fixture(scope="module")
def serve(build):
    return build("serve")


def size_bytes(folder):
    return sum(os.lstat(os.path.join(parent, name)).st_size for parent, _, names in os.walk(folder) for name in names)


def test_the_image_of_a_node_is_small(buildah, serve):
    unpacked, compressed = size_bytes(serve.root), buildah.compressed_bytes(serve.name)
    packages = size_bytes(serve.root / "opt/datasvc")
    say(
        f"the image `serve` has {unpacked / 1e6:.0f} MB unpacked, {packages / 1e6:.0f} of them packages of Python, "
        f"and {compressed / 1e6:.0f} MB compressed"
    )
    assert unpacked < MAX_UNPACKED
    assert compressed < MAX_COMPRESSED


def test_a_container_ingests_exports_and_stages_as_user_1000_with_a_read_only_root(serve):
    assert serve.said("datasvc", "--version") == f"datasvc {datasvc.__version__}\n"
    assert serve.said("id", "-u") == "1000\n"
    refused = subprocess.run(serve.words("touch", "/x"), capture_output=True, text=True, check=False)
    assert "Read-only file system" in refused.stderr
    serve.said("datasvc", "ingest", "photos", "pets")
    assert "\npets\t1\t10\t" in serve.said("datasvc", "ls")
    # Parquet, and what pyarrow loads for it: the image lacks parts of pyarrow.
    serve.said("datasvc", "export", "pets", "files", "--format", "parquet")
    serve.said("datasvc", "ingest", "files", "again")
    assert '"problems": 0' in serve.said("datasvc", "doctor", "--json", "--repo", "/tmp/repo")
    assert "fetched" in serve.said("datasvc", "stage", "pets", "--budget", "10MB")
    # The driver of S3, with the descriptions of services that were left in the image.
    program = "import s3fs; s3fs.S3FileSystem(key='k', secret='s', skip_instance_cache=True).connect(); print('made')"
    assert serve.said("python3", "-c", program) == "made\n"
    program = "from obstore.store import S3Store; print(type(S3Store('b', region='r')).__name__)"
    assert serve.said("python3", "-c", program) == "S3Store\n"


def test_the_command_of_the_image_serves_until_its_health_check_passes(buildah, serve):
    kind, *check = buildah.healthcheck(serve.name)
    assert kind == "CMD"
    with serve.started() as process:
        place = [
            "nsenter",
            f"--target={process.pid}",
            "--mount",
            "--net",
            "chroot",
            "--userspec=1000:1000",
            serve.root,
        ]
        done = subprocess.run([*place, *check], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        process.terminate()
        assert process.wait() == 0
        assert subprocess.run([*place, *check], capture_output=True, check=False).returncode


def test_the_image_of_a_training_is_built_by_the_same_lines(build):
    """With a small extra in place of torch and DALI for CUDA, which need several gigabytes."""
    train = build("train", "--build-arg=TRAIN_EXTRAS=yaml")
    assert "--data" in train.said(*train.config["Cmd"])
    assert json.loads(train.said("python3", "-c", "import yaml; print(yaml.safe_load('{a: 1}')['a'])")) == 1
