"""`datasvc models import | export | push | pull`, in this process, which spares starting Python every time."""

import json

import pytest
import torch
from safetensors.torch import load_file

from datasvc.cli.main import make_app
from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models import DataUse, restore, save
from datasvc.models.versions.signing import make_key
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from tests.samples import write_folder


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs a command on a repository and gives what it printed."""
    monkeypatch.setenv("COLUMNS", "200")

    def run_command(repository, *arguments):
        capsys.readouterr()
        make_app()(["models", *map(str, arguments), "--repo", repository.url], standalone_mode=False)
        return capsys.readouterr().out

    return run_command


@pytest.mark.slow
def test_import_and_export_say_what_they_did(run, repository, tmp_path):
    torch.save({"fc.weight": torch.ones(4, 3), "fc.bias": torch.zeros(4)}, tmp_path / "net.pth")
    said = run(
        repository, "import", tmp_path / "net.pth", "net", "--map", "fc=head", "--step", "7", "-m", "from a file"
    )
    assert "(torch) as net@1: 2 tensors, 64 bytes" in said
    assert list(restore(repository, "net").state["model"]) == ["head.weight", "head.bias"]
    out = tmp_path / "hub"
    said = run(
        repository, "export", "net", out, "--format", "huggingface", "--only", "*.weight", "--dtype", "float16"
    )
    assert said == f"exported net@1 as huggingface to {out}: 1 tensor, 24 bytes, 1 file\n"
    assert load_file(out / "model.safetensors")["head.weight"].dtype == torch.float16
    again = json.loads(run(repository, "import", out, "half", "--json"))
    assert again == {
        "version": "half@1",
        "format": "huggingface",
        "tensors": 1,
        "bytes": 24,
        "new_bytes": again["new_bytes"],
        "ignored": [],
        "files": [],
        "left_out": [],
    }


@pytest.mark.slow
@pytest.mark.parametrize("target", ["safetensors", "torch", pytest.param("dcp", marks=pytest.mark.slow)])
def test_every_format_comes_back_through_the_command_line(run, repository, tmp_path, target):
    save(repository, "net", {"model": {"w": torch.randn(3)}, "step": 5}, step=5)
    files = json.loads(run(repository, "export", "net", tmp_path / "out", "--format", target, "--json"))["files"]
    assert sorted(files) == sorted(str(path) for path in (tmp_path / "out").iterdir())
    run(repository, "import", tmp_path / "out", "again")
    a, b = restore(repository, "net").state, restore(repository, "again").state
    assert a["step"] == b["step"]
    assert torch.equal(a["model"]["w"], b["model"]["w"])


def test_an_export_to_onnx_without_a_module_is_refused(run, repository, tmp_path):
    save(repository, "net", {}, step=0)
    with pytest.raises(ConfigError, match="give it with --model"):
        run(repository, "export", "net", tmp_path / "out", "--format", "onnx")


def test_onnx_refuses_what_it_has_no_use_for(run, repository, tmp_path):
    save(repository, "net", {}, step=0)
    for option in (["--only", "x"], ["--exclude", "x"], ["--dtype", "float16"], ["--max-shard-size", "1GB"]):
        with pytest.raises(ConfigError, match=f"{option[0]} cannot be used with --format onnx"):
            run(repository, "export", "net", tmp_path / "out", "--format", "onnx", *option)


def make_linear():
    return torch.nn.Linear(2, 1)


def test_an_unsigned_version_is_not_exported_as_any_format(run, repository, tmp_path):
    for needed in ("cryptography", "onnx", "onnxscript"):
        pytest.importorskip(needed)
    save(repository, "net", {"model": make_linear().state_dict()}, step=0)
    key = make_key(tmp_path / "key").source
    more = ["--model", f"{__name__}:make_linear", "--input", "2x2", "--trusted-keys", key]
    for target in ("onnx", "safetensors"):
        with pytest.raises(CorruptDataError, match="net@1 is not trusted"):
            run(repository, "export", "net", tmp_path / "out", "--format", target, *more)
        assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_read(run, repository, tmp_path, monkeypatch):
    save(repository, "net", {"model": torch.ones(2)}, step=0)
    for path in repository.storage.local_path("objects").rglob("*"):
        if path.is_file():
            path.unlink()
    (tmp_path / "file").touch()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "link").symlink_to(tmp_path)
    cases = {
        ".": "is the working folder",
        tmp_path / "file": "it is a file",
        tmp_path / "file" / "out": "is a file",
        tmp_path / "link": "is not empty",
    }
    for folder, message in cases.items():
        for command in (["restore"], ["export"]):
            with pytest.raises(ConfigError, match=message):
                run(repository, *command, "net", folder)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match="is not writable; name another folder"):
        run(repository, "restore", "net", tmp_path / "a" / "b")
    monkeypatch.setattr("os.path.ismount", lambda _path: True)
    with pytest.raises(ConfigError, match="is a mount point"):
        run(repository, "restore", "net", tmp_path / "mounted")


def test_an_empty_folder_behind_a_link_is_filled(run, repository, tmp_path):
    save(repository, "net", {"model": torch.ones(2)}, step=0)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    run(repository, "restore", "net", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "tensors.safetensors").exists()


def test_push_and_pull_move_versions_once(run, repository, tmp_path):
    save(repository, "net", {"model": torch.randn(30, 30)}, step=1)
    save(repository, "net", {"model": torch.randn(30, 30)}, step=2, parent="net@1")
    url = str(tmp_path / "other")
    with pytest.raises(NotFoundError, match="no repository at"):
        run(repository, "push", "net", "--to", url)
    said = run(repository, "push", "net", "--to", url, "--create", "--with-parents")
    assert said.splitlines()[1:3] == ["net@1\tnet@1\tnew", "net@2\tnet@2\tnew"]
    assert "copied" in said
    assert "existed" in run(repository, "push", "net", "--to", url)
    third = Repository.create(str(tmp_path / "third"))
    done = json.loads(run(third, "pull", "net@1", "--from", url, "--name", "mine", "--json"))
    assert done["versions"] == [{"source": "net@1", "target": "mine@1", "kind": "models", "new": True}]
    assert done["objects"] > 0


def test_without_a_source_a_push_creates_no_target(run, tmp_path):
    source = Repository.create(str(tmp_path / "source"))
    (tmp_path / "source").rename(tmp_path / "moved")
    with pytest.raises(NotFoundError, match="source"):
        run(source, "push", "net", "--to", str(tmp_path / "target"), "--create")
    assert not (tmp_path / "target").exists()


def test_a_data_set_that_the_target_has_another_of_moves_under_another_name(run, repository, tmp_path):
    other = Repository.create(str(tmp_path / "other"))
    for where, seed in ((repository, "x"), (other, "y")):
        ingest(where, str(write_folder(tmp_path / seed, {"train": {seed: 3}})), "pets")
    digest = open_dataset(repository, "pets@1")["train"].digest
    save(repository, "net", {"w": torch.ones(2)}, step=1, data=[DataUse("pets@1", "train", {"version": digest})])
    for way in (["push", "net", "--to", other.url], ["pull", "net", "--from", repository.url]):
        where = repository if way[0] == "push" else other
        with pytest.raises(ConfigError, match="--rename-data pets=NAME"):
            run(where, *way, "--with-data")
        with pytest.raises(ConfigError, match="expected OLD=NEW"):
            run(where, *way, "--with-data", "--rename-data", "pets")
        said = run(where, *way, "--with-data", "--rename-data", "pets=theirs")
        assert said.splitlines()[1].startswith("pets@1\ttheirs@1\t")
